"""The heads of a call, one by one, with their own backward pass: on CPUs."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from flax_attn.backends.blocked.passes import backward, forward
from flax_attn.backends.blocked.slices import add, put, take
from flax_attn.backends.blocked.tiles import Head
from flax_attn.backends.blocked.tiling import Tiling
from flax_attn.backends.call import Call, Floats
from flax_attn.backends.nonfinite import headroom, row_factor
from flax_attn.backends.softmax import Softmax
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.nonfinite import finite_tokens, zero_nonfinite

Totals = TypeVar("Totals", Softmax, Floats)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(tiling: Tiling, call: Call) -> Array:
    return forward_heads(tiling, call).output


def _forward(tiling: Tiling, call: Call) -> tuple[Array, tuple[Call, Softmax]]:
    done = forward_heads(tiling, call)
    return done.output, (call, done)


def _backward(tiling: Tiling, saved: tuple[Call, Softmax], cotangent: Array) -> tuple[Call]:
    call, done = saved
    found = backward_heads(tiling, call, done, cotangent)
    return (call.cotangent(found),)


_attend.defvjp(_forward, _backward)

# An eager call would compile its loops each time.
attend_heads = jax.jit(_attend, static_argnums=0, inline=True)


def forward_heads(tiling: Tiling, call: Call) -> Softmax:
    """Return the output `(b, t, n, v)`, and the maxima and sums `(b, n, t, 1)` of its softmax."""
    dtype = accumulation_dtype(call.query.dtype)
    bias = _padded_bias(tiling, call.bias)
    factor = row_factor(call, dtype)
    call = _for_products(call)
    b, n, t, most = call.shape
    if call.dropout is not None:
        # Kept weights are divided by the share that is kept.
        most = most / (1 - call.dropout.rate)

    def one(b: Array, n: Array) -> Softmax:
        head = _head(tiling, call, bias, b, n)
        return _forward_head(head, headroom(head.value, most), _rows_of(factor, b, n))

    rows = jnp.zeros((b, n, t, 1), dtype)
    output = jnp.zeros((b, t, n, call.value.shape[3]), dtype)
    return _over_heads(call, one, _store, Softmax(output, rows, rows))


def _forward_head(head: Head, room: Array, factor: Array) -> Softmax:
    # With values that are smaller by a factor, so that their sums are finite.
    found = forward(replace(head, value=head.value * room))
    output = found.output / room.astype(found.output.dtype) * factor
    # The backward pass divides by the total.
    return replace(found, output=output, total=found.total * factor)


def _store(sums: Softmax, b: Array, n: Array, found: Softmax) -> Softmax:
    output = put(sums.output, _tokens_first(found.output), (b, 0, n, 0))
    top = put(sums.top, found.top[None], (b, n, 0, 0))
    total = put(sums.total, found.total[None], (b, n, 0, 0))
    return Softmax(output, top, total)


def backward_heads(tiling: Tiling, call: Call, saved: Softmax, cotangent: Array) -> Floats:
    """Return the gradients, where the keys may be a part of those that `saved` is over."""
    dtype = accumulation_dtype(call.query.dtype)
    bias = _padded_bias(tiling, call.bias)
    group = call.query.shape[2] // call.key.shape[2]
    call = _for_products(call)

    def one(b: Array, n: Array) -> Floats:
        head = _head(tiling, call, bias, b, n)
        found = backward(head, _saved_head(saved, b, n), _pick(cotangent, b, n))
        return _only_finite(call, b, n, found)

    padded = call.floats._replace(bias=bias)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), padded)
    sums = _over_heads(call, one, partial(_add_head, call.scale, group), zeros)
    return sums._replace(bias=_unpadded_bias(tiling, sums.bias, call.bias))


def _saved_head(saved: Softmax, b: Array, n: Array) -> Softmax:
    output = _pick(saved.output, b, n)
    return Softmax(output, _rows_of(saved.top, b, n), _rows_of(saved.total, b, n))


def _only_finite(call: Call, b: Array, n: Array, found: Floats) -> Floats:
    # The gradients of tokens that are finite, and that of the scale.
    kv = n // (call.query.shape[2] // call.key.shape[2])
    tokens = _pick(call.query, b, n), _pick(call.key, b, kv), _pick(call.value, b, kv)
    query, key, value = map(_where_finite, tokens, found[:3])
    scale = (found.query * zero_nonfinite(tokens[0])).sum()
    return found._replace(query=query, key=key, value=value, scale=scale)


def _add_head(factor: Any, group: int, sums: Floats, b: Array, n: Array, found: Floats) -> Floats:
    return Floats(
        query=put(sums.query, _tokens_first(found.query * factor), (b, 0, n, 0)),
        key=_put_group(sums.key, found.key, b, n, group),
        value=_put_group(sums.value, found.value, b, n, group),
        bias=_add_bias(sums.bias, found.bias, b, n),
        sinks=_add_sinks(sums.sinks, found.sinks, n),
        scale=_add_scale(sums.scale, found.scale),
        captured=tuple(map(_add_captured, sums.captured, found.captured)),
    )


def _add_scale(total: Array | None, part: Array | None) -> Array | None:
    return total if total is None or part is None else total + part.sum()


def _add_captured(total: Array, part: Array) -> Array:
    return total + part.sum(axis=0)


def heads_memory(tiling: Tiling, call: Call) -> int:
    """Return the bytes of three tiles, of one padded head, and of maxima and sums."""
    b, n, t, _ = call.shape
    head = tiling.tokens * (call.query.shape[3] + call.value.shape[3])
    numbers = 3 * tiling.block * tiling.widest + head + 2 * b * n * t
    return accumulation_dtype(call.query.dtype).itemsize * numbers


def _for_products(call: Call) -> Call:
    # Once, and not in the loop over heads, which reads a key/value head once a query head.
    dtype = accumulation_dtype(call.query.dtype)
    query, key, value = (x.astype(dtype) for x in (call.query, call.key, call.value))
    return replace(call, query=query, key=key, value=value)


def _over_heads(call: Call, one: Callable, store: Callable, sums: Totals) -> Totals:
    """Return `sums` after `store(sums, b, n, one(b, n))` for every head."""
    b, n, *_ = call.shape

    def step(i: Array, sums: Totals) -> Totals:
        # One by one, since a batched product is slow on CPU.
        row, head = jnp.asarray(i, jnp.int32) // n, jnp.asarray(i, jnp.int32) % n
        found = jax.tree.map(lambda x: x[None], one(row, head))
        return store(sums, row, head, found)

    return lax.fori_loop(0, b * n, step, sums)


def _head(tiling: Tiling, call: Call, bias: Array | None, b: Array, n: Array) -> Head:
    kv = n // (call.query.shape[2] // call.key.shape[2])
    query = zero_nonfinite(_pick(call.query, b, n)) * call.scale
    rows = (0, tiling.padded_t - tiling.t), (0, 0)
    cols = (tiling.pad_before, tiling.pad_after), (0, 0)
    _, mask = call.mask.split_band()  # the tiling knows the band
    return Head(
        call=call,
        tiling=tiling,
        query=jnp.pad(query, rows),
        key=jnp.pad(zero_nonfinite(_pick(call.key, b, kv)), cols),
        value=jnp.pad(zero_nonfinite(_pick(call.value, b, kv)), cols),
        bias=bias,
        score=None if call.score is None else call.score.head(b, n),
        sink=None if call.sinks is None else take(call.sinks, (n,), (1,)),
        mask=mask.row(b, n),
        b=b,
        n=n,
    )


def _where_finite(x: Array, gradient: Array) -> Array:
    return jnp.where(finite_tokens(x)[:, None], gradient, 0)


def _pick(x: Array, b: Array, n: Array) -> Array:
    _, tokens, _, width = x.shape
    return take(x, (b, 0, n, 0), (1, tokens, 1, width)).reshape(tokens, width)


def _rows_of(x: Array, b: Array, n: Array) -> Array:
    return take(x, (b, n, 0, 0), (1, 1, *x.shape[2:]))[0, 0]


def _tokens_first(x: Array) -> Array:
    return x.swapaxes(0, 1)[None]


def _put_group(array: Array, part: Array, b: Array, n: Array, group: int) -> Array:
    if group == 1:
        return put(array, _tokens_first(part), (b, 0, n, 0))
    # Query heads of one group share a key/value head.
    return add(array, _tokens_first(part), (b, 0, n // group, 0))


def _add_sinks(array: Array | None, part: Array | None, n: Array) -> Array | None:
    return None if array is None or part is None else add(array, part, (n,))


def _add_bias(array: Array | None, part: Array | None, b: Array, n: Array) -> Array | None:
    if array is None or part is None:
        return None
    rows, heads, *_ = array.shape
    # An axis of one serves every index.
    at = 0 if rows == 1 else b, 0 if heads == 1 else n, 0, 0
    return add(array, part[None], at)


def _padded_bias(tiling: Tiling, bias: Array | None) -> Array | None:
    if bias is None:
        return None
    *_, rows, cols = bias.shape
    below = (0, tiling.padded_t - tiling.t) if rows > 1 else (0, 0)
    beside = (tiling.pad_before, tiling.pad_after) if cols > 1 else (0, 0)
    return jnp.pad(bias, ((0, 0), (0, 0), below, beside))


def _unpadded_bias(tiling: Tiling, padded: Array | None, bias: Array | None) -> Array | None:
    if padded is None or bias is None:
        return None
    before = tiling.pad_before if bias.shape[3] > 1 else 0
    return take(padded, (0, 0, 0, before), bias.shape)
