"""All heads of a call at once, in few and large products: forward and backward on accelerators.

A tile holds all keys that its queries may see, so that its softmax is whole:

    w = exp(x - max x) / sum exp(x - max x);  o = w @ value

Backward computes the weights of a tile again from the saved maxima and sums:

    dx = w * (do @ value^T - delta);  delta = sum(do * o)
    dq = dx @ key;  dk = dx^T @ query;  dv = w^T @ do
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float

from flax_attn.backends.blocked.slices import add, put
from flax_attn.backends.blocked.spans import Division, Span, divided
from flax_attn.backends.blocked.wide_tile import Rows, WideTile, prepared
from flax_attn.backends.call import Call, Floats
from flax_attn.backends.nonfinite import headroom
from flax_attn.backends.softmax import Softmax
from flax_attn.backends.tile import score_gradients
from flax_attn.backends.work import KernelWork, arrays_moved, arrays_read, is_float32, products
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.nonfinite import finite_tokens, zero_nonfinite
from flax_attn.functional.shapes import Index

# Scores of a tile: of float32 once, and of weights and gradients in the dtype of the call.
FORWARD, BACKWARD = 2**26, 2**25
UNROLLED_FORWARD, UNROLLED_BACKWARD = 32, 4  # tiles: more of them are looped over


@jax.custom_vjp
def _attend(call: Call) -> Array:
    return _forward(call)[0]


def _forward(call: Call) -> tuple[Array, tuple[Call, Softmax]]:
    done = forward_batched(call, call.query.dtype)
    return done.output, (call, done)


def _backward(saved: tuple[Call, Softmax], cotangent: Array) -> tuple[Call]:
    call, done = saved
    return (call.cotangent(backward_batched(call, done, cotangent)),)


_attend.defvjp(_forward, _backward)

# An eager call would compile each operation.
attend_batched = jax.jit(_attend, inline=True)


def forward_batched(call: Call, dtype: jnp.dtype) -> Softmax:
    """Return the output `(b, t, n, v)` in a dtype, and the softmax's maxima and sums."""
    _, _, _, most = call.shape
    if call.dropout is not None:
        # Kept weights are divided by the share that is kept.
        most = most / (1 - call.dropout.rate)
    room = headroom(zero_nonfinite(call.value), most)
    arrays = prepared(call, room)

    division = divided(call, FORWARD, UNROLLED_FORWARD)

    def in_span(query: Array, part: Index | int, span: Span) -> tuple[Array, Softmax]:
        def step(query: Array, i: Index | int) -> tuple[Array, Softmax]:
            own = arrays._replace(query=query)
            found = _forward_tile(WideTile.of(own, division, part, span, i), room, dtype)
            # One tile after the other, since there is memory for one.
            return lax.optimization_barrier((query, found))

        query, found = _scan(span.count, step, query)
        return query, jax.tree.map(_join_tiles, found)

    _, found = _over_spans(division, in_span, arrays.query)
    return Softmax(rearrange(found.output, "b n t v -> b t n v"), found.top, found.total)


def _forward_tile(tile: WideTile, room: Array, dtype: jnp.dtype) -> Softmax:
    masked, _ = tile.scores()
    # Of a row that sees nothing it is a number that can be subtracted from itself.
    lowest = jnp.finfo(masked.dtype).min.astype(masked.dtype)
    top = lax.reduce(masked, lowest, lax.max, (3,))[..., None]
    sinks = tile.sinks()
    top = top if sinks is None else jnp.maximum(top, sinks)
    # XLA would write the differences to memory, to read them for the sum.
    top = lax.optimization_barrier(top)
    exps = jnp.exp(masked - top)
    total = exps.sum(axis=-1, keepdims=True)
    total = total if sinks is None else total + jnp.exp(sinks - top)
    factors = tile.dropout_factors()
    exps = exps if factors is None else exps * factors
    divisor = jnp.where(total == 0, 1, total) * room.astype(total.dtype)
    output = tile.of_keys(exps, tile.arrays.value) / divisor
    return Softmax(output.astype(dtype), top, total)


def backward_batched(call: Call, saved: Softmax, cotangent: Array) -> Floats:
    """Return the gradients, where the keys may be a part of those that `saved` is over."""
    # Else XLA would keep what forward computed of every tile, for all of them at once.
    call, saved, cotangent = lax.optimization_barrier((call, saved, cotangent))
    dtype = accumulation_dtype(call.query.dtype)
    rows = _rows(saved, cotangent, dtype)
    arrays = prepared(call)
    division = divided(call, BACKWARD, UNROLLED_BACKWARD)

    def in_span(sums: Floats, part: Index | int, span: Span) -> tuple[Floats, None]:
        def step(sums: Floats, i: Index | int) -> tuple[Floats, None]:
            tile = WideTile.of(arrays, division, part, span, i)
            return _backward_tile(tile, tile.rows(rows), sums), None

        # The loop adds up the gradients of its own keys, which a product can do by itself.
        first = WideTile.of(arrays, division, part, span, 0)
        key, value = first.take_keys(sums.key), first.take_keys(sums.value)
        found, _ = _scan(span.count, step, sums._replace(key=key, value=value))
        key, value = (
            put(x, own, first.key_start)
            for x, own in ((sums.key, found.key), (sums.value, found.value))
        )
        return found._replace(key=key, value=value), None

    shared = call.floats._replace(key=arrays.key, value=arrays.value, sinks=None)
    if not isinstance(call.scale, jax.Array):
        shared = shared._replace(scale=None)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), shared)
    zeros = zeros._replace(query=jnp.zeros_like(call.query))
    sums, _ = _over_spans(division, in_span, zeros)
    d_key, d_value = (rearrange(x, "b k s h -> b s k h") for x in (sums.key, sums.value))
    return sums._replace(
        query=_where_finite(call.query, sums.query),
        key=_where_finite(call.key, d_key * call.scale),
        value=_where_finite(call.value, d_value),
        sinks=_sinks_gradient(call, saved, rows),
    )


def _rows(saved: Softmax, cotangent: Array, dtype: jnp.dtype) -> Rows:
    empty = saved.total == 0
    share = jnp.where(empty, 0, 1 / jnp.where(empty, 1, saved.total))
    delta = (saved.output.astype(dtype) * cotangent.astype(dtype)).sum(axis=-1)
    return Rows(
        cotangent=cotangent,
        top=saved.top,
        share=share,
        delta=rearrange(delta, "b t n -> b n t 1"),
    )


def _backward_tile(tile: WideTile, rows: Rows, sums: Floats) -> Floats:
    call, arrays = tile.call, tile.arrays
    masked, capped = tile.scores()
    weights = jnp.where(masked == -jnp.inf, 0, jnp.exp(masked - rows.top) * rows.share)
    # Kept in the dtype of the products, so that the scores need no memory beyond this.
    weights = lax.optimization_barrier(weights.astype(call.query.dtype))
    d_weights = tile.with_keys(rows.cotangent, arrays.value)
    weights = weights.astype(d_weights.dtype)
    factors = tile.dropout_factors()
    dropped = weights
    if factors is not None:
        dropped, d_weights = weights * factors, d_weights * factors
    pull = None if call.score is None else tile.pull
    found = score_gradients(weights, d_weights, rows.delta, capped, call.soft_cap, pull)
    d_scores = lax.optimization_barrier(found.scores.astype(call.query.dtype))
    d_query = tile.of_keys(d_scores, arrays.key)
    scaled = rearrange((d_query * call.scale).astype(call.query.dtype), "b n t h -> b t n h")
    pairs = zip(sums.captured, found.captured, strict=True)
    return Floats(
        query=put(sums.query, scaled, tile.query_start),
        key=sums.key + tile.of_queries(d_scores, tile.clean_query()),
        value=sums.value + tile.of_queries(dropped, rows.cotangent),
        bias=_with_bias(sums.bias, tile, found.scores),
        scale=_with_scale(sums.scale, tile.clean_query(), d_query),
        captured=tuple(total + d.astype(total.dtype) for total, d in pairs),
    )


def _with_bias(bias: Array | None, tile: WideTile, d_scores: Array) -> Array | None:
    if bias is None:
        return None
    shared = tuple(axis for axis, size in enumerate(bias.shape) if size == 1)
    part = d_scores.sum(axis=shared, keepdims=True)
    return add(bias, part, tile.start(bias.shape))


def _with_scale(scale: Array | None, query: Array, d_query: Array) -> Array | None:
    return None if scale is None else scale + (d_query * query.astype(d_query.dtype)).sum()


def _sinks_gradient(call: Call, saved: Softmax, rows: Rows) -> Array | None:
    if call.sinks is None:
        return None
    sinks = rearrange(call.sinks.astype(saved.top.dtype), "n -> 1 n 1 1")
    weight = jnp.exp(sinks - rows.top) * rows.share
    return -(weight * rows.delta).sum(axis=(0, 2, 3))


def _where_finite(x: Array, gradient: Array) -> Array:
    return jnp.where(finite_tokens(x)[..., None], gradient, 0)


def _over_spans(
    division: Division, in_span: Callable[[Any, Index | int, Span], tuple], carry: Any
) -> tuple[Any, Any]:
    """Return `carry` after every span, and what was found in them, joined to `(b, n, t, _)`."""

    def in_part(carry: Any, part: Index | int) -> tuple[Any, Any]:
        pieces = []
        for span in division.spans:
            carry, found = in_span(carry, part, span)
            pieces.append(found)
        return carry, jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *pieces)

    carry, parts = _scan(division.parts, in_part, carry)
    return carry, jax.tree.map(partial(_join_parts, division), parts)


def _scan(count: int, step: Callable[[Any, Any], tuple], carry: Any) -> tuple[Any, Any]:
    # XLA knows how often such a loop runs, so that the host does not wait for it.
    if count > 1:
        return lax.scan(step, carry, jnp.arange(count, dtype=jnp.int32))
    carry, found = step(carry, 0)
    return carry, jax.tree.map(lambda x: x[None], found)


def _join_tiles(tiles: Float[Array, "i b n t w"]) -> Float[Array, "b n t w"]:
    return rearrange(tiles, "i b n t w -> b n (i t) w")


def _join_parts(division: Division, parts: Float[Array, "i b n t w"]) -> Array:
    # A part is some rows of the batch whole, or some heads of one row.
    return rearrange(parts, "(p j) b n t w -> (p b) (j n) t w", j=division.head_parts)


def batched_memory(call: Call) -> int:
    """Return the bytes of a tile's scores and weights, of clean keys, and of the output twice."""
    b, n, t, _ = call.shape
    itemsize, width = call.query.dtype.itemsize, call.value.shape[3]
    sums = accumulation_dtype(call.query.dtype).itemsize
    division = divided(call, FORWARD, UNROLLED_FORWARD)
    group = call.query.shape[2] // call.key.shape[2]
    tile = division.batch * division.heads * group * division.largest
    keys = (call.key.size + call.value.size) * itemsize
    return tile * (sums + itemsize) + keys + b * n * t * (width * itemsize + 2 * sums)


def batched_work(call: Call) -> KernelWork:
    """Return the work of all tiles: two products each, and weights; and of clean keys."""
    b, n, _, _ = call.shape
    division = divided(call, FORWARD, UNROLLED_FORWARD)
    pairs = sum(span.count * span.rows * span.cols for span in division.spans)
    tiles = division.parts * sum(span.count for span in division.spans)
    sums = accumulation_dtype(call.query.dtype).itemsize
    # Scores and weights are written once, and read once.
    both = b * n * pairs * (sums + call.query.dtype.itemsize)
    flops, moved = products(call, pairs), arrays_moved(call) + both
    apart = both + 3 * arrays_read(call)
    return KernelWork(4 * tiles + 12, flops, moved, apart, is_float32(call))
