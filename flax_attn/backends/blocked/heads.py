"""The heads of a call, one by one or all of a batch row at once, with their own backward pass."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from flax_attn.backends.blocked.passes import backward, forward
from flax_attn.backends.blocked.slices import add, put, take
from flax_attn.backends.blocked.tiles import Head, Static
from flax_attn.backends.blocked.tiling import Tiling
from flax_attn.backends.call import Floats
from flax_attn.backends.nonfinite import headroom
from flax_attn.backends.softmax import Softmax
from flax_attn.functional.dropout import KeyedDropout
from flax_attn.functional.nonfinite import finite_tokens, zero_nonfinite
from flax_attn.functional.traced_score import TracedScore


class Options(NamedTuple):
    """The arrays of a call beside query, key and value.

    Args:
        bias: bias of rank 4, broadcasting to `(b, n, t, s)`.
        score: function of scores.
        sinks: sinks `(n,)`.
        scale: factor on the scores.
        mask: mask without the band of the tiling.
        dropout: None or a rate and a key.
        row_factor: factor `(b, n, t, 1)`, NaN for rows that may see a number that is not finite,
            and else 1.
    """

    bias: Array | None
    score: TracedScore | None
    sinks: Array | None
    scale: Array
    mask: Any
    dropout: KeyedDropout | None
    row_factor: Array | None  # None among gradients


class Loop(NamedTuple):
    """What is known before tracing: how to compute a head, and how many heads to take at once."""

    static: Static
    width: int


@partial(jax.jit, static_argnums=0, inline=True)  # an eager call would compile its loops each time
def attend_heads(loop: Loop, query: Array, key: Array, value: Array, options: Options) -> Array:
    """Return the output `(b, t, n, v)` in the dtype of sums."""
    return _attend(loop, query, key, value, options)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(loop: Loop, query: Array, key: Array, value: Array, options: Options) -> Array:
    return forward_heads(loop, query, key, value, options).output


def forward_heads(loop: Loop, query: Array, key: Array, value: Array, options: Options) -> Softmax:
    """Return the output `(b, t, n, v)`, and the maxima and sums `(b, n, t, 1)` of its softmax."""
    (b, t, n, _), v = query.shape, value.shape[-1]
    arrays = query, key, value, _padded_bias(loop.static.tiling, options.bias)
    kept = 1.0 if options.dropout is None else 1 - options.dropout.rate  # by which dropout divides

    def one(b, n):
        head = _head(loop.static, arrays, options, b, n)
        room = headroom(head.value, key.shape[1] / kept)
        result = forward(loop.static, head._replace(value=head.value * room))
        factor = _rows_of(jnp.asarray(options.row_factor), b, n)
        output = result.output / room.astype(loop.static.sums) * factor
        # The backward pass divides by the total.
        return replace(result, output=output, total=result.total * factor)

    def store(sums, b, n, result):
        output, tops, totals = sums
        return (
            put(output, _tokens_first(result.output), (b, 0, n, 0)),
            put(tops, result.top[None], (b, n, 0, 0)),
            put(totals, result.total[None], (b, n, 0, 0)),
        )

    parts = jnp.zeros((b, n, t, 1), loop.static.sums)
    sums = jnp.zeros((b, t, n, v), loop.static.sums), parts, parts
    return Softmax(*_over_heads(loop, b, n, one, store, sums))


def backward_heads(
    loop: Loop,
    query: Array,
    key: Array,
    value: Array,
    options: Options,
    saved: Softmax,
    cotangent: Array,
) -> Floats:
    """Return the gradients, where the keys may be a part of those that `saved` is over."""
    output, tops, totals = saved.output, saved.top, saved.total
    static, (b, _, n, _) = loop.static, query.shape
    arrays, group = (
        (query, key, value, _padded_bias(static.tiling, options.bias)),
        n // key.shape[2],
    )

    def one(b, n):
        saved = Softmax(_pick(output, b, n), _rows_of(tops, b, n), _rows_of(totals, b, n))
        found = backward(
            static, _head(static, arrays, options, b, n), saved, _pick(cotangent, b, n)
        )
        query, key, value = (
            _pick(x, b, i) for x, i in zip(arrays[:3], (n, n // group, n // group), strict=True)
        )
        d_scale = (found.query * zero_nonfinite(query).astype(static.sums)).sum()
        d_query, d_key, d_value = (
            jnp.where(finite_tokens(x)[:, None], d, 0)
            for x, d in zip((query, key, value), found[:3], strict=True)
        )
        return found._replace(query=d_query, key=d_key, value=d_value), d_scale

    def store(sums, b, n, result):
        (d_query, d_key, d_value, d_bias, d_sinks, d_captured), d_scale = result
        return (
            put(sums[0], _tokens_first(d_query * options.scale), (b, 0, n, 0)),
            _put_group(sums[1], d_key, b, n, group),
            _put_group(sums[2], d_value, b, n, group),
            None if d_bias is None else _add_bias(sums[3], d_bias, b, n),
            None if d_sinks is None else add(sums[4], d_sinks, (n,)),
            sums[5] + d_scale.sum(),
            tuple(total + d.sum(axis=0) for total, d in zip(sums[6], d_captured, strict=True)),
        )

    captured = () if options.score is None else options.score.floats
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, static.sums), (*arrays, options.sinks, options.scale, captured)
    )
    d_query, d_key, d_value, d_bias, d_sinks, d_scale, d_captured = _over_heads(
        loop, b, n, one, store, zeros
    )
    if d_bias is not None and options.bias is not None:
        d_bias = _unpadded_bias(static.tiling, d_bias, options.bias)
    return Floats(d_query, d_key, d_value, d_bias, d_sinks, d_scale, d_captured)


def _forward(loop, *arrays):
    done = forward_heads(loop, *arrays)
    return done.output, (*arrays, done)


def _backward(loop, saved, cotangent):
    query, key, value, options, done = saved
    found = backward_heads(loop, query, key, value, options, done, cotangent)
    captured = () if options.score is None else options.score.floats
    arrays = Floats(query, key, value, options.bias, options.sinks, options.scale, captured)
    found: Floats = jax.tree.map(lambda d, x: d.astype(x.dtype), found, arrays)
    score = None if options.score is None else options.score.cotangent(found.captured)
    of_options = {"bias": found.bias, "score": score, "sinks": found.sinks, "scale": found.scale}
    return (
        found.query,
        found.key,
        found.value,
        Options(**of_options, mask=None, dropout=None, row_factor=None),
    )


_attend.defvjp(_forward, _backward)


def _over_heads(loop, b, n, one, store, sums):
    # Returns `sums` after `store(sums, b, n, one(b, n))` for every head.
    def step(i, sums):
        i = jnp.asarray(i, jnp.int32)
        row, first = i * loop.width // n, i * loop.width % n
        if loop.width == 1:
            return store(sums, row, first, jax.tree.map(lambda x: x[None], one(row, first)))
        heads = first + jnp.arange(loop.width, dtype=jnp.int32)
        return store(sums, row, first, jax.vmap(one, (None, 0))(row, heads))

    return lax.fori_loop(0, b * n // loop.width, step, sums)


def _head(static: Static, arrays: tuple, options: Options, b: Array, n: Array) -> Head:
    query, key, value, bias = arrays
    tiling, group = static.tiling, query.shape[2] // key.shape[2]
    query = zero_nonfinite(_pick(query, b, n)).astype(static.sums) * options.scale
    key, value = (
        zero_nonfinite(_pick(x, b, n // group)).astype(static.operand) for x in (key, value)
    )
    ends = ((tiling.pad_before, tiling.pad_after), (0, 0))
    return Head(
        query=jnp.pad(query.astype(static.operand), ((0, tiling.padded_t - tiling.t), (0, 0))),
        key=jnp.pad(key, ends),
        value=jnp.pad(value, ends),
        bias=bias,
        score=None if options.score is None else options.score.head(b, n),
        sink=None if options.sinks is None else take(options.sinks, (n,), (1,)),
        mask=options.mask.row(b, n),
        dropout=options.dropout,
        b=b,
        n=n,
    )


def _pick(x: Array, b: Array, n: Array) -> Array:
    return take(x, (b, 0, n, 0), (1, x.shape[1], 1, x.shape[3])).reshape(x.shape[1], x.shape[3])


def _rows_of(x: Array, b: Array, n: Array) -> Array:
    return take(x, (b, n, 0, 0), (1, 1, *x.shape[2:]))[0, 0]


def _tokens_first(x: Array) -> Array:
    return x.swapaxes(0, 1)[None]


def _put_group(array: Array, part: Array, b: Array, n: Array, group: int) -> Array:
    if group == 1:
        return put(array, _tokens_first(part), (b, 0, n, 0))
    # Query heads of one group share a key/value head.
    shared = part.reshape(-1, min(group, part.shape[0]), *part.shape[1:]).sum(axis=1)
    return add(array, _tokens_first(shared), (b, 0, n // group, 0))


def _add_bias(array: Array, part: Array, b: Array, n: Array) -> Array:
    part = part.sum(axis=0, keepdims=True) if array.shape[1] == 1 else part
    row, head = (0 if size == 1 else i for size, i in zip(array.shape, (b, n), strict=False))
    return add(array, part[None], (row, head, 0, 0))


def _padded_bias(tiling: Tiling, bias: Array | None) -> Array | None:
    if bias is None:
        return None
    ends = (0, tiling.padded_t - tiling.t), (tiling.pad_before, tiling.pad_after)
    ends = (end if size > 1 else (0, 0) for end, size in zip(ends, bias.shape[2:], strict=True))
    return jnp.pad(bias, ((0, 0), (0, 0), *ends))


def _unpadded_bias(tiling: Tiling, padded: Array, bias: Array) -> Array:
    at = (0, 0, 0, tiling.pad_before if bias.shape[3] > 1 else 0)
    return take(padded, at, bias.shape)
