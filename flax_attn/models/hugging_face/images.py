"""The names of weights that image encoders share in Hugging Face folders."""

from flax_attn.convert.rules import Layout, Rule
from flax_attn.models.hugging_face.family import linears, norms

_ATTENTION = {
    "att.W_query": "attention.attention.query",
    "att.W_key": "attention.attention.key",
    "att.W_value": "attention.attention.value",
    "att.out_proj": "attention.output.dense",
}


def image_layout(
    base: str, linear: dict[str, str], norm: dict[str, str], *rules: Rule, ignored: str = ""
) -> Layout:
    """Return the names of the weights of an encoder of images.

    Args:
        base: prefix of all names.
        linear: our names of the linear layers of a block except the attention, by theirs.
        norm: our names of the norms of a block, by theirs.
        rules: further rules of the family.
        ignored: pattern of ignored names, as in `Layout`.
    """
    table = f"{base}embeddings"
    patches = f"{table}.patch_embeddings.projection"
    prefixes = "trf_blocks.{i}.", f"{base}encoder.layer.{{i}}."
    return Layout(
        (
            Rule(("cls_token",), f"{table}.cls_token", "d -> 1 1 d"),
            Rule(("pos_emb.embedding",), f"{table}.position_embeddings", "t d -> 1 t d"),
            Rule(("patches.proj.kernel",), f"{patches}.weight", "(c p q) d -> d c p q"),
            Rule(("patches.proj.bias",), f"{patches}.bias"),
            *linears(_ATTENTION | linear, *prefixes),
            *norms(norm, *prefixes),
            *norms({"final_norm": f"{base}layernorm"}),
            *linears({"classifier": "classifier"}),
            *rules,
        ),
        ignored=ignored,
    )
