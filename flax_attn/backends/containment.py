"""Containment of numbers that are not finite around a fused kernel, without copies of all that the kernel reads.

A kernel multiplies hidden keys and values by zero, and 0 * NaN is NaN, so it would have to read clean copies. Here it
reads query, key and value as they are. Only where one of their numbers is not finite, or so large that a product may
overflow, its results are thrown away for those of the kernel on clean copies: in a branch, one head after the other,
since XLA reserves the memory of a branch whether it is taken or not.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool

from flax_attn.backends.blocked.slices import add, put, take
from flax_attn.backends.call import Call
from flax_attn.backends.nonfinite import rows_that_see_nonfinite
from flax_attn.functional.mask_parts import Dense, Lengths
from flax_attn.functional.masks import Mask
from flax_attn.functional.nonfinite import zero_nonfinite

_LARGE = 1e14  # the product of two such numbers, summed over a head, is far from overflowing float32
_ARRAYS = ("query", "key", "value", "sinks", "scale")
Kernel = Callable[[Call], Array]


def contain(call: Call, kernel: Kernel) -> Array:
    """Return the output `(b, t, n, v)` of a kernel under the contract; differentiable once, in reverse mode.

    The kernel keeps the contract for finite numbers of ordinary size, and takes neither bias nor dropout.
    """
    arrays = {name: x for name in _ARRAYS if isinstance(x := getattr(call, name), jax.Array)}
    traced, mask_of = _split(call.mask)

    def rebuilt(arrays: dict[str, Array], traced: list[Array]) -> Call:
        return replace(call, **arrays, mask=mask_of(traced))

    @jax.custom_vjp
    def attend(arrays: dict[str, Array], traced: list[Array]) -> Array:
        call = rebuilt(arrays, traced)
        return _unless(_ordinary(call.query, call.key, call.value), kernel(call), lambda: _output(call, kernel))

    def forward(arrays: dict[str, Array], traced: list[Array]) -> tuple[Array, tuple]:
        call = rebuilt(arrays, traced)
        ordinary = _ordinary(call.query, call.key, call.value)
        output, pullback = jax.vjp(lambda arrays: kernel(rebuilt(arrays, traced)), arrays)
        return _unless(ordinary, output, lambda: _output(call, kernel)), (ordinary, pullback, arrays, traced)

    def backward(saved: tuple, cotangent: Array) -> tuple[dict[str, Array], None]:
        ordinary, pullback, arrays, traced = saved
        clean = lambda: _gradients(rebuilt(arrays, traced), kernel, tuple(arrays), cotangent)  # noqa: E731
        return _unless(ordinary, pullback(cotangent)[0], clean), None

    attend.defvjp(forward, backward)
    return attend(arrays, traced)


def _unless(ordinary: Array, found: Any, clean: Callable[[], Any]) -> Any:
    return lax.cond(ordinary, lambda: found, clean)


def _split(mask: Mask) -> tuple[list[Array], Callable[[list[Array]], Mask]]:
    """Return what is traced in a mask, and the mask as a function of it; a kernel may need the rest as it is."""
    leaves, tree = jax.tree.flatten(mask)

    def mask_of(traced: list[Array]) -> Mask:
        rest = iter(traced)
        return tree.unflatten(next(rest) if isinstance(leaf, Tracer) else leaf for leaf in leaves)

    return [leaf for leaf in leaves if isinstance(leaf, Tracer)], mask_of


@jax.custom_batching.custom_vmap
def _ordinary(*arrays: Array) -> Bool[Array, ""]:
    """Return whether all numbers are finite and of ordinary size."""
    return jnp.stack([jnp.abs(x).max(initial=0) <= _LARGE for x in arrays]).all()


@_ordinary.def_vmap
def _ordinary_of_all(size: int, batched: Any, *arrays: Array) -> tuple[Array, bool]:
    # One answer for the whole batch: with one for each element `jax.vmap` would compute both branches.
    return _ordinary(*arrays), False


def _output(call: Call, kernel: Kernel) -> Array:
    (b, t, n, _), width = call.query.shape, _width(call, 1)

    def step(i: Array, output: Array) -> Array:
        row, first = i * width // n, i * width % n
        return put(output, _cleaned(_part(call, row, first, width), kernel), (row, 0, first, 0))

    return lax.fori_loop(0, b * n // width, step, jnp.zeros((b, t, n, call.value.shape[3]), call.query.dtype))


def _gradients(call: Call, kernel: Kernel, names: tuple[str, ...], cotangent: Array) -> dict[str, Array]:
    (b, t, n, _), k = call.query.shape, call.key.shape[2]
    width = _width(call, n // k)  # all heads that share a key/value head

    def step(i: Array, sums: dict[str, Array]) -> dict[str, Array]:
        row, first = i * width // n, i * width % n
        part = _part(call, row, first, width)
        arrays = {name: getattr(part, name) for name in names}
        _, pullback = jax.vjp(lambda arrays: _cleaned(replace(part, **arrays), kernel), arrays)
        found = pullback(take(cotangent, (row, 0, first, 0), (1, t, width, cotangent.shape[3])))[0]
        at = {"query": (row, 0, first, 0), "sinks": (first,), "scale": ()}
        return {name: add(sums[name], found[name], at.get(name, (row, 0, first * k // n, 0))) for name in names}

    return lax.fori_loop(0, b * n // width, step, {name: jnp.zeros_like(getattr(call, name)) for name in names})


def _width(call: Call, width: int) -> int:
    # A mask that differs between heads is known before tracing, and so cannot be that of a traced head.
    return call.query.shape[2] if any(isinstance(part, Dense) for part in call.mask.parts) else width


def _part(call: Call, row: Array, first: Array, width: int) -> Call:
    """Return the call of one row of the batch and of `width` heads, and of the key/value heads that they read."""
    (_, n, t, s), k = call.shape, call.key.shape[2]
    kv, count = first * k // n, max(width * k // n, 1)
    return replace(
        call,
        query=take(call.query, (row, 0, first, 0), (1, t, width, call.query.shape[3])),
        key=take(call.key, (row, 0, kv, 0), (1, s, count, call.key.shape[3])),
        value=take(call.value, (row, 0, kv, 0), (1, s, count, call.value.shape[3])),
        sinks=None if call.sinks is None else take(call.sinks, (first,), (width,)),
        mask=Mask(tuple(part if isinstance(part, Dense) else part.row(row, None) for part in call.mask.parts)),
    )


def _cleaned(call: Call, kernel: Kernel) -> Array:
    output = kernel(replace(call, **{name: _clean(call, name) for name in ("query", "key", "value")}))
    spoilt = rearrange(rows_that_see_nonfinite(call), "b n t 1 -> b t n 1")
    return output * jnp.where(spoilt, jnp.nan, 1).astype(output.dtype)  # a factor, so that gradients become NaN too


def _clean(call: Call, name: str) -> Array:
    """Return the query, key or value with zeros for tokens that are not finite, or that no row may see.

    Huge numbers in hidden tokens may overflow in the backward kernel.
    """
    inside = inside_lengths(call, "query" if name == "query" else "key")
    return jnp.where(inside[..., None, None], zero_nonfinite(getattr(call, name)), 0)


def inside_lengths(call: Call, name: str) -> Bool[Array, "#b t"]:
    """Return which query or key tokens lie within all lengths, and for keys within what any query may see."""
    index = jnp.arange(getattr(call, name).shape[1], dtype=jnp.int32)[None]
    inside = jnp.ones_like(index, bool)
    if name == "key":
        seen = call.mask.kv_range(0, call.shape[2] - 1, call.shape[3])
        inside = (index >= seen.start) & (index < seen.stop)
    for part in call.mask.parts:
        if isinstance(part, Lengths) and getattr(part, name) is not None:
            tokens = index[None, None]
            inside = inside & Lengths(**{name: getattr(part, name)}).allow(tokens, tokens)[:, 0, 0]
    return inside
