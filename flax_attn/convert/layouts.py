"""The known layouts, as tables. A row reads: our parameters, their entry, how one becomes the other."""

from flax_attn.convert.rules import Layout, Rule

_KERNELS = ("W_query.kernel", "W_key.kernel", "W_value.kernel")
_BIASES = ("W_query.bias", "W_key.bias", "W_value.bias")
_LINEAR = Rule(("kernel",), "weight", "i o -> o i")
_SAME = Rule(("*",), "*")


def _split_heads(ours: str, theirs: str) -> tuple[Rule, Rule]:
    return (
        Rule((f"{ours}.kernel",), f"{theirs}.kernel", "i (n h) -> i n h"),
        Rule((f"{ours}.bias",), f"{theirs}.bias", "(n h) -> n h"),
    )


def _needs_plain_heads(module) -> str | None:
    """Return why a module does not fit a format that knows neither grouped queries nor a change of width."""
    if getattr(module, "num_kv_heads", None) != getattr(module, "num_heads", None):
        return f"it has no grouped queries; got num_heads={module.num_heads}, num_kv_heads={module.num_kv_heads}"
    if getattr(module, "d_in", None) != getattr(module, "d_out", None):
        return f"its output is as wide as its input; got d_in={module.d_in}, d_out={module.d_out}"
    return None


LAYOUTS = {
    # torch_ref, and any PyTorch module with our names: Linear weights are (out, in).
    "torch_ref": Layout((_LINEAR, _SAME), ignored=r"(.*\.)?mask"),
    # One fused projection, `qkv_proj` (out, in) with rows [query; key; value], and `out_proj`.
    "fused_qkv": Layout(
        (
            Rule(_KERNELS, "qkv_proj.weight", "i o -> o i"),
            Rule(_BIASES, "qkv_proj.bias"),
            _LINEAR,
            _SAME,
        ),
        ignored=r"(.*\.)?mask",
    ),
    # torch.nn.MultiheadAttention: packed where the three inputs are equally wide, else one weight each.
    "torch_mha": Layout(
        (
            Rule(_KERNELS, "in_proj_weight", "i o -> o i"),
            Rule(("W_query.kernel",), "q_proj_weight", "i o -> o i"),
            Rule(("W_key.kernel",), "k_proj_weight", "i o -> o i"),
            Rule(("W_value.kernel",), "v_proj_weight", "i o -> o i"),
            Rule(_BIASES, "in_proj_bias"),
            _LINEAR,
            _SAME,
        ),
        refuse=_needs_plain_heads,
    ),
    # The attention of Hugging Face's GPT-2: Conv1D weights are (in, out), columns [query, key, value].
    "hf_gpt2": Layout(
        (
            Rule(_KERNELS, "c_attn.weight", axis=1),
            Rule(_BIASES, "c_attn.bias"),
            Rule(("out_proj.kernel",), "c_proj.weight"),
            Rule(("out_proj.bias",), "c_proj.bias"),
        ),
        ignored=r"(.*\.)?(attn\.)?masked_bias|(.*\.)?attn\.bias|bias",
        refuse=_needs_plain_heads,
    ),
    # flax.linen.MultiHeadDotProductAttention and flax.nnx.MultiHeadAttention: the head axis stands apart.
    "flax": Layout(
        (
            *_split_heads("W_query", "query"),
            *_split_heads("W_key", "key"),
            *_split_heads("W_value", "value"),
            Rule(("out_proj.kernel",), "out.kernel", "(n h) o -> n h o"),
            Rule(("out_proj.bias",), "out.bias"),
        )
    ),
}
