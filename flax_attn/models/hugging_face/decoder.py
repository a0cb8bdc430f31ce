"""The names of weights that rotary decoders share in Hugging Face folders."""

from collections.abc import Mapping

from flax_attn.convert.rules import Layout, Rule
from flax_attn.models.hugging_face.family import embeddings, linears, norms

_LINEARS = {
    "att.W_query": "self_attn.q_proj",
    "att.W_key": "self_attn.k_proj",
    "att.W_value": "self_attn.v_proj",
    "att.out_proj": "self_attn.o_proj",
    "ff.W_gate": "mlp.gate_proj",
    "ff.W_up": "mlp.up_proj",
    "ff.W_down": "mlp.down_proj",
}
_HEAD_NORMS = {"att.q_norm": "self_attn.q_norm", "att.k_norm": "self_attn.k_norm"}
_PRE_NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
_NORMS = {
    "norm1": "input_layernorm",
    "post_norm1": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "post_norm2": "post_feedforward_layernorm",
}


def decoder_layout(*first: Rule, block_norms: Mapping[str, str] = _PRE_NORMS) -> Layout:
    """Return the names of a decoder's weights.

    Args:
        first: rules before those of all decoders, for weights that a family stores differently.
        block_norms: names of the norms of a block in the files, by ours.

    Example:
        >>> [rule.theirs for rule in decoder_layout().rules][:2]
        ['model.embed_tokens.weight', 'model.layers.{i}.self_attn.q_proj.weight']
    """
    prefixes = "trf_blocks.{i}.", "model.layers.{i}."
    return Layout(
        (
            *first,
            *embeddings({"tok_emb": "model.embed_tokens"}),
            *linears(_LINEARS, *prefixes),
            *linears({"out_head": "lm_head"}),
            *norms({**_HEAD_NORMS, **block_norms}, *prefixes),
            *norms({"final_norm": "model.norm"}),
        ),
        # The frequencies of RoPE are no parameters, and a tied head may be stored a second time.
        ignored=r"(.*\.)?rotary_emb\.inv_freq|(.*\.)?lm_head\.weight",
    )


DECODER_LAYOUT = decoder_layout()
# With norms of what attention and the feed-forward layer return.
POST_NORM_LAYOUT = decoder_layout(block_norms=_NORMS)
