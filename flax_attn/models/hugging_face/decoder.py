"""The names of weights that rotary decoders share in Hugging Face folders."""

from collections.abc import Mapping

from flax_attn.convert.rules import Layout, Rule
from flax_attn.models.hugging_face.family import embeddings, linears, norms

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
    block, layer = "trf_blocks.{i}", "model.layers.{i}"
    return Layout(
        (
            *first,
            *embeddings({"tok_emb": "model.embed_tokens"}),
            *linears(
                {
                    f"{block}.att.W_query": f"{layer}.self_attn.q_proj",
                    f"{block}.att.W_key": f"{layer}.self_attn.k_proj",
                    f"{block}.att.W_value": f"{layer}.self_attn.v_proj",
                    f"{block}.att.out_proj": f"{layer}.self_attn.o_proj",
                    f"{block}.ff.W_gate": f"{layer}.mlp.gate_proj",
                    f"{block}.ff.W_up": f"{layer}.mlp.up_proj",
                    f"{block}.ff.W_down": f"{layer}.mlp.down_proj",
                    "out_head": "lm_head",
                }
            ),
            *norms(
                {
                    f"{block}.att.{name}": f"{layer}.self_attn.{name}"
                    for name in ("q_norm", "k_norm")
                }
            ),
            *norms(
                {f"{block}.{ours}": f"{layer}.{theirs}" for ours, theirs in block_norms.items()}
            ),
            *norms({"final_norm": "model.norm"}),
        ),
        # The frequencies of RoPE are no parameters, and a tied head may be stored a second time.
        ignored=r"(.*\.)?rotary_emb\.inv_freq|(.*\.)?lm_head\.weight",
    )


DECODER_LAYOUT = decoder_layout()
POST_NORM_LAYOUT = decoder_layout(
    block_norms=_NORMS
)  # with norms of what attention and feed-forward layer return
