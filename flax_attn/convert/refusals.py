"""What layouts refuse: a check returns why a module cannot be stored, or None where it holds."""

from collections.abc import Callable
from typing import Any

from flax import nnx

Check = Callable[[Any], str | None]


def ours_unless(*checks: Check) -> Check:
    """Refuse one of our attention modules unless the checks hold; accept any other module."""
    return lambda module: (
        _first((no_latents, no_state, *checks), module) if hasattr(module, "W_query") else None
    )


def nnx_unless(*checks: Check) -> Check:
    """Refuse a `flax.nnx.MultiHeadAttention` unless the checks hold; accept any other module."""
    return lambda module: (
        _first(checks, module) if isinstance(module, nnx.MultiHeadAttention) else None
    )


def _first(checks: tuple[Check, ...], module: Any) -> str | None:
    return next(filter(None, (check(module) for check in checks)), None)


def no_state(module: Any) -> str | None:
    """Refuse a recurrent attention."""
    return (
        "it holds attention by softmax, and this module has a state"
        if hasattr(module, "conv_query")
        else None
    )


def no_latents(module: Any) -> str | None:
    """Refuse keys and values that are made of latents."""
    if not hasattr(module, "W_latent"):
        return None
    return (
        "its keys and values are made of the input; got latents,"
        f" kv_lora_rank={module.kv_lora_rank}"
    )


def has_output(module: Any) -> str | None:
    """Refuse heads without an output projection."""
    return (
        None
        if hasattr(module, "out_proj")
        else "it holds heads with an output projection, and this module has none"
    )


def biases_alike(module: Any) -> str | None:
    """Refuse a bias in some projections only."""
    qkv, out = (getattr(module, name).bias is not None for name in ("W_query", "out_proj"))
    return (
        None
        if qkv == out
        else f"its projections all have a bias or none has; got qkv_bias={qkv}, out_bias={out}"
    )


def biases_all(module: Any) -> str | None:
    """Refuse projections without a bias."""
    return (
        "its projections have a bias; got qkv_bias=False, out_bias=False"
        if module.W_query.bias is None
        else None
    )


def biases_none(module: Any) -> str | None:
    """Refuse projections with a bias."""
    qkv, out = (getattr(module, name).bias is not None for name in ("W_query", "out_proj"))
    return (
        f"its projections have no bias; got qkv_bias={qkv}, out_bias={out}" if qkv or out else None
    )


def heads_alike(module: Any) -> str | None:
    """Refuse grouped queries."""
    n, k = module.num_heads, module.num_kv_heads
    return None if n == k else f"it has no grouped queries; got num_heads={n}, num_kv_heads={k}"


def width_kept(module: Any) -> str | None:
    """Refuse an output of another width than the input."""
    if module.d_in == module.d_out:
        return None
    return f"its output is as wide as its input; got d_in={module.d_in}, d_out={module.d_out}"


def heads_share_width(module: Any) -> str | None:
    """Refuse heads that are together wider or narrower than the output."""
    n, h, d = module.num_heads, module.head_dim, module.d_out
    return (
        None
        if n * h == d
        else f"its heads share its width; got num_heads={n}, head_dim={h}, d_out={d}"
    )


def no_qk_norm(module: Any) -> str | None:
    """Refuse norms of queries and keys."""
    norms = {name: getattr(module, name, None) for name in ("q_norm", "k_norm")}
    got = [f"{name}={type(norm).__name__}" for name, norm in norms.items() if norm is not None]
    return f"it has no place for norms of queries and keys; got {', '.join(got)}" if got else None


def no_gate(module: Any) -> str | None:
    """Refuse a gate of what the heads return."""
    gate = getattr(module, "output_gate", None)
    return (
        None
        if gate is None
        else f"it has no place for a gate of the heads; got output_gate={gate!r}"
    )


def no_lambda(module: Any) -> str | None:
    """Refuse differential attention."""
    return (
        f"it has no place for lambda; got a {type(module).__name__}"
        if hasattr(module, "lambda_init")
        else None
    )


def no_rope(module: Any) -> str | None:
    """Refuse rotary positions."""
    rope = getattr(module, "rope", None)
    return None if rope is None else f"it has no rotary positions; got rope={rope}"


def scores_plain(module: Any) -> str | None:
    """Refuse another scale than `1 / sqrt(h)`, a soft cap, sinks and a function."""
    scores = getattr(module, "scores", None)
    if scores is None or _values(scores) == (None, None, False, None):
        return None
    return (
        "its scores have the scale 1 / sqrt(head_dim), no function, no soft cap and no sinks; got"
        f" scores={scores}"
    )


def scores_unscaled(module: Any) -> str | None:
    """Refuse another scale than 1, a soft cap, sinks and a function."""
    scores = getattr(module, "scores", None)
    if scores is not None and _values(scores) == (1.0, None, False, None):
        return None
    return (
        f"its scores have the scale 1, no function, no soft cap and no sinks; got scores={scores}. "
        "Pass scores=Scores(scale=1.0)"
    )


def _values(scores: Any) -> tuple[Any, ...]:
    return scores.scale, scores.soft_cap, scores.sinks, scores.function


def self_attention(module: Any) -> str | None:
    """Refuse keys and values of another width than the queries."""
    if module.d_in == module.kdim == module.vdim:
        return None
    return f"it is self-attention; got d_in={module.d_in}, kdim={module.kdim}, vdim={module.vdim}"


def inputs_alike(module: Any) -> str | None:
    """Refuse query, key and value inputs that are not equally wide."""
    widths = [getattr(module, name).kernel.shape[0] for name in ("W_query", "W_key", "W_value")]
    return (
        None
        if len(set(widths)) == 1
        else f"query, key and value inputs are equally wide; got widths {widths}"
    )


def features_alike(module: Any) -> str | None:
    """Refuse heads or an output of another width than the query input."""
    widths = module.in_features, module.qkv_features, module.out_features
    if len(set(widths)) == 1:
        return None
    names = ("in_features", "qkv_features", "out_features")
    got = ", ".join(f"{name}={width}" for name, width in zip(names, widths, strict=True))
    return f"queries, heads and output are equally wide; got {got}"


def other_kernels(module: Any) -> str | None:
    """Refuse kernels that are not those of a PyTorch layer with two axes exchanged."""
    if not isinstance(module, nnx.LinearGeneral | nnx.Einsum | nnx.ConvTranspose):
        return None
    return (
        "its kernel is not that of a PyTorch layer with the last two axes first. "
        "For nnx.MultiHeadAttention take the layout 'nnx_mha', for others write a Layout"
    )
