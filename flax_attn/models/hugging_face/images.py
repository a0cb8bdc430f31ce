"""The fields and names of weights that image encoders share in Hugging Face folders."""

import reprlib
from typing import Any

from flax_attn.convert.rules import Layout, Rule
from flax_attn.models.hugging_face.bounds import IMAGES
from flax_attn.models.hugging_face.family import linears, norms
from flax_attn.models.hugging_face.fields import ACTIVATIONS, THEIR_ACTIVATIONS, Fields
from flax_attn.models.image_encoder import ImageConfig

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
    table, patches = (
        f"{base}embeddings.position_embeddings",
        f"{base}embeddings.patch_embeddings.projection",
    )
    layer = f"{base}encoder.layer.{{i}}."
    return Layout(
        (
            Rule(("cls_token",), f"{base}embeddings.cls_token", "d -> 1 1 d"),
            Rule(("pos_emb.embedding",), table, "t d -> 1 t d"),
            Rule(("patches.proj.kernel",), f"{patches}.weight", "(c p q) d -> d c p q"),
            Rule(("patches.proj.bias",), f"{patches}.bias"),
            *linears(
                {
                    f"trf_blocks.{{i}}.{ours}": layer + theirs
                    for ours, theirs in (_ATTENTION | linear).items()
                }
            ),
            *norms({f"trf_blocks.{{i}}.{ours}": layer + theirs for ours, theirs in norm.items()}),
            *norms({"final_norm": f"{base}layernorm"}),
            *linears({"classifier": "classifier"}),
            *rules,
        ),
        ignored=ignored,
    )


def read_images(fields: Fields, dropout: float | None) -> dict[str, Any]:
    """Return the arguments of an `ImageConfig`, all but the width of the feed-forward layer.

    Raises:
        ValueError: if a field is missing or of another kind.
    """
    return {
        "d_model": fields.integer("hidden_size"),
        "num_heads": fields.heads("num_attention_heads"),
        "num_layers": fields.count("num_hidden_layers"),
        "image_size": fields.pair("image_size", 224, IMAGES),
        "channels": fields.heads("num_channels", 3),
        "qkv_bias": fields.flag("qkv_bias", True),
        "activation": fields.choose("hidden_act", ACTIVATIONS, "gelu"),
        "dropout": fields.rate("hidden_dropout_prob", 0.0) if dropout is None else dropout,
        "attention_dropout": (
            fields.rate("attention_probs_dropout_prob", 0.0) if dropout is None else dropout
        ),
        "labels": _labels(fields),
    }


def _labels(fields: Fields) -> tuple[str, ...]:
    names = fields.optional_object("id2label")
    if names is None:
        return tuple(f"LABEL_{i}" for i in range(fields.count("num_labels", 2)))
    wanted = [str(i) for i in range(len(names))]
    if names.keys() != set(wanted):
        raise ValueError(
            f"{fields.where}: id2label must name the labels 0 to {len(names) - 1}, one each; got "
            f"{reprlib.repr(list(names))}. Take the config.json that came with the weights"
        )
    return tuple(str(names[key]) for key in wanted)


def write_images(config: ImageConfig, model_type: str, architecture: str) -> dict[str, Any]:
    """Return the fields of `config.json`, all but the width of the feed-forward layer."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "image_size": _size(config.image_size),
        "patch_size": _size(config.patch_size),
        "num_channels": config.channels,
        "qkv_bias": config.qkv_bias,
        "hidden_act": THEIR_ACTIVATIONS[config.activation],
        "layer_norm_eps": config.eps,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "id2label": {str(i): name for i, name in enumerate(config.labels)},
        "label2id": {name: i for i, name in enumerate(config.labels)},
    }


def _size(pair: tuple[int, int]) -> int | list[int]:
    return pair[0] if pair[0] == pair[1] else list(pair)
