"""`jax.nn.dot_product_attention` compiled by XLA. The whole scores in memory, on every platform. Source: `jax.nn`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array

from flax_attn.backends.call import Call
from flax_attn.functional.reference import _finite, _hide, _poison

_FILL = -0.7 * float(jnp.finfo(jnp.float32).max)  # what jax.nn puts in the place of a hidden score


def refuse(call: Call) -> str | None:
    """Return why jax.nn cannot honour the call, or None."""
    if call.query.dtype.name not in ("float32", "bfloat16", "float16"):
        return f"xla takes its softmax in float32 and needs float32, bfloat16 or float16; got {call.query.dtype.name}"
    if call.soft_cap is not None:
        return f'xla has no soft cap; got soft_cap={call.soft_cap}. Pass backend="auto"'
    return refuse_options("xla", call)


def attend(call: Call) -> Array:
    """Return the output, the whole mask given as one boolean array."""

    def kernel(query, key, value, bias, visible):
        # In lower dtypes jax.nn rounds the weights, has no float16 but on GPUs, and no gradient if promotion is strict.
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        bias = None if bias is None else bias.astype(jnp.float32)
        output = jax.nn.dot_product_attention(query, key, value, bias, visible, scale=call.scale, implementation="xla")
        return output.astype(call.query.dtype)

    return attend_dense(call, kernel, _FILL)


def memory(call: Call) -> int:
    """Return `12 b n t s`: scores, exponentials and weights, each in float32."""
    b, n, t, s = call.shape
    return 12 * b * n * t * s


def refuse_options(name: str, call: Call) -> str | None:
    """Return what no kernel behind the interface of jax.nn can honour, or None."""
    (*_, h), (*_, v) = call.query.shape, call.value.shape
    if 0 in call.shape:
        return f"{name} needs at least one batch row and one query token; got (b, n, t, s) = {call.shape}"
    if h != v:
        return f'{name} needs queries and values of one head width; got h={h}, v={v}. Pass backend="auto"'
    if call.sinks is not None:
        return f'{name} has no attention sinks; got sinks of shape {call.sinks.shape}. Pass backend="auto"'
    if call.dropout is not None:
        return f'{name} cannot drop by key and index; got dropout at rate {call.dropout.rate}. Pass backend="auto"'
    if call.precision is not None:
        return f"{name} takes no precision; got {call.precision!r}. Set jax.default_matmul_precision around the call"
    return None


def attend_dense(call: Call, kernel: Callable[..., Array], fill: float) -> Array:
    """Return `kernel(query, key, value, bias, visible)` under the contract, for kernels that do not keep it themselves.

    The kernel gets finite numbers, no bias of -inf or near its own `fill` for hidden scores, and rows that all see
    something: those that do not are opened, and zeroed afterwards, so that no kernel divides by nothing.
    """
    visible, bias = _hide(_array(call), call.bias)
    (query, query_ok), (key, key_ok), (value, value_ok) = map(_finite, (call.query, call.key, call.value))
    sees = visible.any(axis=-1, keepdims=True)
    bias = None if bias is None else _above(bias, fill / 2)
    output = kernel(query, key, value, bias, visible | ~sees)
    poison = _poison(visible, query_ok, key_ok & value_ok, output.dtype)
    return jnp.where(rearrange(sees, "b n t 1 -> b t n 1"), output, 0) * rearrange(poison, "b n t 1 -> b t n 1")


def _array(call: Call) -> Array:
    # Whole over (t, s), which not every kernel broadcasts; axes b and n stay 1 where the mask does not depend on them.
    _, _, t, s = call.shape
    block = call.mask.block(jnp.arange(t), jnp.arange(s))
    return jnp.broadcast_to(block, (*block.shape[:2], t, s))


def _above(bias: Array, floor: float) -> Array:
    # A visible score below the fill would lose to a hidden one. The gradient is that of the bias itself.
    constant = jax.lax.stop_gradient(bias)
    return jnp.maximum(constant, max(floor, float(jnp.finfo(bias.dtype).min))) + (bias - constant)
