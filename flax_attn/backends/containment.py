"""Numbers that are not finite, around a kernel: they only reach the rows that see them.

A kernel multiplies hidden keys and values by zero, and 0 * NaN is NaN. There are two strategies:

- `on_copies`: the kernel reads clean copies, with zeros for tokens that are not finite, and the
  rows that see such a token are made NaN.
- `on_test`: the kernel reads query, key and value as they are, without copies of all that it reads.
  Only where one of their numbers is not finite, its results are thrown away for those on copies: in
  a branch, one head after the other, since XLA reserves the memory of a branch whether it is taken
  or not. Where XLA may divide the call among devices all heads are taken at once: to slice an axis
  that is divided it would gather the whole array.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array

from flax_attn.backends.blocked.slices import put, take
from flax_attn.backends.call import Call, Floats
from flax_attn.backends.nonfinite import all_finite, known_row_factor, row_factor
from flax_attn.backends.platform import may_be_partitioned
from flax_attn.functional.nonfinite import zero_nonfinite

Kernel = Callable[[Call], Array]
Arrays = tuple[Array, ...]  # query, key and value
Found = TypeVar("Found")


def on_copies(call: Call, kernel: Kernel) -> Array:
    """Return the output `(b, t, n, v)` of a kernel that reads clean copies."""
    return _on_copies(call, kernel, row_factor)


def _on_copies(call: Call, kernel: Kernel, factor: Callable) -> Array:
    clean = tuple(zero_nonfinite(x) for x in _arrays(call))
    output = kernel(_with(call, clean))
    # A factor, so that gradients become NaN too.
    return output * rearrange(factor(call, output.dtype), "b n t 1 -> b t n 1")


def on_test(call: Call, kernel: Kernel) -> Array:
    """Return the output `(b, t, n, v)` of a kernel that reads what is given.

    It is differentiable once, in reverse mode, by query, key and value. The kernel takes a mask
    that is the same for all heads.
    """
    return _attend(kernel, call)


def if_finite(finite: Array, found: Found, clean: Callable[[], Found]) -> Found:
    """Return what was found, or where it is not finite what `clean` computes."""
    return lax.cond(finite, lambda: found, clean)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(kernel: Kernel, call: Call) -> Array:
    return if_finite(_finite(*_arrays(call)), kernel(call), lambda: _output(call, kernel))


def _forward(kernel: Kernel, call: Call) -> tuple[Array, tuple]:
    finite = _finite(*_arrays(call))
    output, pullback = jax.vjp(lambda *arrays: kernel(_with(call, arrays)), *_arrays(call))
    output = if_finite(finite, output, lambda: _output(call, kernel))
    return output, (call, finite, pullback)


def _backward(kernel: Kernel, saved: tuple, cotangent: Array) -> tuple[Call]:
    call, finite, pullback = saved
    found = pullback(cotangent)
    query, key, value = if_finite(finite, found, lambda: _gradients(call, kernel, cotangent))
    return (call.cotangent(Floats(query, key, value)),)


_attend.defvjp(_forward, _backward)


def memory(call: Call) -> int:
    """Return the bytes of clean copies of query, key and value, and of their output.

    Those of one head, or of all heads where XLA may divide the call.
    """
    (b, n, t, s), k = call.shape, call.key.shape[2]
    tokens = b * (n * t + k * s) if may_be_partitioned() else t + s
    return call.query.dtype.itemsize * tokens * (call.query.shape[3] + call.value.shape[3])


def _with(call: Call, arrays: Arrays) -> Call:
    query, key, value = arrays
    return replace(call, query=query, key=key, value=value)


_finite = jax.custom_batching.custom_vmap(all_finite)


@_finite.def_vmap
def _finite_in_all(size: int, batched: Any, *arrays: Array) -> tuple[Array, bool]:
    # One answer for the whole batch: with one for each element `jax.vmap` would compute both
    # branches.
    return _finite(*arrays), False


def _output(call: Call, kernel: Kernel) -> Array:
    if may_be_partitioned():
        return _on_copies(call, kernel, known_row_factor)
    b, t, n, _ = call.query.shape
    zeros = jnp.zeros((b, t, n, call.value.shape[3]), call.query.dtype)
    return lax.fori_loop(0, b * n, partial(_put_output, call, kernel), zeros)


def _put_output(call: Call, kernel: Kernel, i: Array, output: Array) -> Array:
    n = call.query.shape[2]
    row, head = i // n, i % n
    found = _on_copies(_heads(call, row, head, 1), kernel, known_row_factor)
    return put(output, found, (row, 0, head, 0))


def _gradients(call: Call, kernel: Kernel, cotangent: Array) -> Arrays:
    if may_be_partitioned():
        return _gradients_on_copies(call, kernel, cotangent)
    b, _, k, _ = call.key.shape
    step = partial(_put_gradients, call, kernel, cotangent)
    zeros = tuple(jnp.zeros_like(x) for x in _arrays(call))
    return lax.fori_loop(0, b * k, step, zeros)


def _put_gradients(call: Call, kernel: Kernel, cotangent: Array, i: Array, sums: Arrays) -> Arrays:
    row, kv = i // call.key.shape[2], i % call.key.shape[2]
    # Heads that share a key/value head, whose gradient the kernel sums.
    group = call.query.shape[2] // call.key.shape[2]
    found = _gradients_of_heads(call, kernel, cotangent, row, kv * group)
    places = [(row, 0, head, 0) for head in (kv * group, kv, kv)]
    return tuple(map(put, sums, found, places))


def _gradients_of_heads(
    call: Call, kernel: Kernel, cotangent: Array, row: Array, first: Array
) -> Arrays:
    part = _heads(call, row, first, call.query.shape[2] // call.key.shape[2])
    shape = *part.query.shape[:3], cotangent.shape[3]
    return _gradients_on_copies(part, kernel, take(cotangent, (row, 0, first, 0), shape))


def _arrays(call: Call) -> Arrays:
    return call.query, call.key, call.value


def _heads(call: Call, row: Array, first: Array, width: int) -> Call:
    """Return the call of one row of the batch and `width` heads that share a key/value head."""
    (_, n, t, s), k = call.shape, call.key.shape[2]
    query = take(call.query, (row, 0, first, 0), (1, t, width, call.query.shape[3]))
    key, value = (
        take(x, (row, 0, first * k // n, 0), (1, s, 1, x.shape[3])) for x in (call.key, call.value)
    )
    return replace(call, query=query, key=key, value=value, mask=call.mask.row(row, None))


def _gradients_on_copies(call: Call, kernel: Kernel, cotangent: Array) -> Arrays:
    def output(*arrays: Array) -> Array:
        return _on_copies(_with(call, arrays), kernel, known_row_factor)

    _, pullback = jax.vjp(output, *_arrays(call))
    return pullback(cotangent)
