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


def _not_fused(module) -> str | None:
    """Return why the three projections of a module cannot be one."""
    widths = [getattr(module, name).kernel.shape[0] for name in ("W_query", "W_key", "W_value")]
    return None if len(set(widths)) == 1 else f"query, key and value inputs are equally wide; got widths {widths}"


def _not_flax(module) -> str | None:
    """Return why a module is not the shape of the usual attention layer: heads, an output, biases all or none."""
    if not hasattr(module, "out_proj"):
        return "it holds heads with an output projection, and this module has none"
    biases = [getattr(module, name).bias is not None for name in ("W_query", "out_proj")]
    if biases[0] != biases[1]:
        return f"its projections all have a bias or none has; got qkv_bias={biases[0]}, out_bias={biases[1]}"
    return None


def _not_torch(module) -> str | None:
    """Return why a module does not fit a format without grouped queries or a change of width."""
    reason = _not_flax(module)
    if reason:
        return reason
    if module.num_kv_heads != module.num_heads:
        return f"it has no grouped queries; got num_heads={module.num_heads}, num_kv_heads={module.num_kv_heads}"
    if module.d_in != module.d_out:
        return f"its output is as wide as its input; got d_in={module.d_in}, d_out={module.d_out}"
    return None


def _not_gpt2(module) -> str | None:
    """Return why a module is not the self-attention of GPT-2."""
    reason = _not_torch(module)
    if reason is None and module.W_query.bias is None:
        return "its projections have a bias; got qkv_bias=False, out_bias=False"
    if reason is None and not module.d_in == module.kdim == module.vdim:
        return f"it is self-attention; got d_in={module.d_in}, kdim={module.kdim}, vdim={module.vdim}"
    return reason


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
        refuse=_not_fused,
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
        refuse=_not_torch,
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
        refuse=_not_gpt2,
    ),
    # flax.linen.MultiHeadDotProductAttention and flax.nnx.MultiHeadAttention: the head axis stands apart.
    "flax": Layout(
        (
            *_split_heads("W_query", "query"),
            *_split_heads("W_key", "key"),
            *_split_heads("W_value", "value"),
            Rule(("out_proj.kernel",), "out.kernel", "(n h) o -> n h o"),
            Rule(("out_proj.bias",), "out.bias"),
        ),
        refuse=_not_flax,
    ),
}
