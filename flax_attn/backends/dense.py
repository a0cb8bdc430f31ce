"""Attention by kernels that take the mask as one array over `(t, s)`.

They have the interface of `jax.nn.dot_product_attention`.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array

from flax_attn.backends.call import Call
from flax_attn.backends.containment import on_copies
from flax_attn.functional.reference import hide


def refuse_empty(name: str, call: Call) -> str | None:
    """Return that there is nothing to compute, or None."""
    if 0 not in call.shape:
        return None
    return (
        f"{name} needs at least one batch row and one query token; got (b, n, t, s) = {call.shape}"
    )


def refuse_widths(name: str, call: Call) -> str | None:
    """Return that queries and values differ in width, or None."""
    (*_, h), (*_, v) = call.query.shape, call.value.shape
    if h == v:
        return None
    return f"{name} needs queries and values of one head width; got h={h}, v={v}"


def attend_dense(call: Call, kernel: Callable[..., Array], fill: float) -> Array:
    """Return `kernel(query, key, value, bias, visible)` under the contract of attention.

    For kernels that do not keep the contract themselves.

    The kernel gets finite numbers, zeros for tokens that nobody sees, no bias of -inf or near its
    own `fill` for hidden scores, and rows that all see something: those that do not are shown every
    key, and zeroed afterwards, so that no kernel divides by zero.
    """
    return on_copies(call, partial(_attend, kernel, fill))


def _attend(kernel: Callable[..., Array], fill: float, call: Call) -> Array:
    visible, bias = hide(_array(call), call.bias)
    sees = visible.any(axis=-1, keepdims=True)
    bias = None if bias is None else _above(bias, fill / 2)
    seeing = rearrange(sees, "b n t 1 -> b t n 1")
    output = kernel(*_seen(call, visible, seeing), bias, visible | ~sees)
    return jnp.where(seeing, output, 0)


def _seen(call: Call, visible: Array, seeing: Array) -> tuple[Array, Array, Array]:
    # Query, key and value with zeros for tokens that see nothing, or that nobody sees.
    seen = rearrange(visible.any(axis=(1, 2)), "b s -> b s 1 1")
    query = jnp.where(seeing, call.query, 0)
    return query, jnp.where(seen, call.key, 0), jnp.where(seen, call.value, 0)


def array_size(call: Call) -> int:
    """Return the number of elements of mask and bias as one array.

    Axes b and n count only where one of them depends on them.
    """
    _, _, t, s = call.shape
    mask = jax.eval_shape(lambda mask: mask.block(jnp.arange(t), jnp.arange(s)), call.mask).shape
    bias = mask if call.bias is None else call.bias.shape
    return max(mask[0], bias[0]) * max(mask[1], bias[1]) * t * s


def _array(call: Call) -> Array:
    # Whole over (t, s), which not every kernel broadcasts; axes b and n stay 1 where the mask does
    # not depend on them.
    _, _, t, s = call.shape
    block = call.mask.block(jnp.arange(t), jnp.arange(s))
    return jnp.broadcast_to(block, (*block.shape[:2], t, s))


def _above(bias: Array, floor: float) -> Array:
    # A visible score below the fill would lose to a hidden one. The gradient is that of the bias
    # itself.
    constant = jax.lax.stop_gradient(bias)
    return jnp.maximum(constant, max(floor, float(jnp.finfo(bias.dtype).min))) + (bias - constant)
