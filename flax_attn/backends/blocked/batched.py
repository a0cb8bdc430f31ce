"""All heads of a call at once, in few and large products: forward and backward on accelerators.

A tile holds all keys that its queries may see, so that its softmax is whole:

    w = exp(x - max x) / sum exp(x - max x);  o = w @ value

Backward computes the weights of a tile again, or from the maxima and sums over more keys than the
call has:

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
from flax_attn.backends.blocked.wide_tile import Rows, TileSoftmax, WideTile, prepared
from flax_attn.backends.call import Call, Floats
from flax_attn.backends.softmax import Softmax
from flax_attn.backends.tile import score_gradients
from flax_attn.backends.work import KernelWork, arrays_moved, arrays_read, is_float32, products
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.nonfinite import finite_tokens
from flax_attn.functional.shapes import Index

# Scores of a tile: of float32 once, and of weights and gradients in the dtype of the call.
FORWARD, BACKWARD = 2**26, 3 * 2**24
UNROLLED = 48  # tiles: more of them are looped over


@jax.custom_vjp
def _attend(call: Call) -> Array:
    return _over_tiles(call, _output)


def _forward(call: Call) -> tuple[Array, tuple[Call, Array]]:
    output = _over_tiles(call, _output)
    return output, (call, output)


def _backward(saved: tuple[Call, Array], cotangent: Array) -> tuple[Call]:
    call, output = saved
    return (call.cotangent(_gradients(call, _rows(call, output, cotangent))),)


_attend.defvjp(_forward, _backward)

# An eager call would compile each operation.
attend_batched = jax.jit(_attend, inline=True)


def forward_batched(call: Call, dtype: jnp.dtype) -> Softmax:
    """Return the output `(b, t, n, v)` in a dtype, and the softmax's maxima and sums."""
    found = _over_tiles(call, partial(_softmax, dtype))
    top, total = (rearrange(x, "b t n 1 -> b n t 1") for x in (found.top, found.total))
    return Softmax(found.output, top, total)


def backward_batched(call: Call, saved: Softmax, cotangent: Array) -> Floats:
    """Return the gradients, where the keys may be a part of those that `saved` is over."""
    rows = _rows(call, saved.output, cotangent)
    k = call.key.shape[2]
    top, total = (rearrange(x, "b (k g) t 1 -> b k t g 1", k=k) for x in (saved.top, saved.total))
    return _gradients(call, rows._replace(top=top, share=_share(total)))


def _over_tiles(call: Call, in_tile: Callable[[WideTile], Any]) -> Any:
    # What is found in all tiles, arrays `(b, t, n, _)`.
    arrays = prepared(call)
    division = divided(call, FORWARD, UNROLLED)

    def in_span(nan: Array, part: Index | int, span: Span) -> tuple[Array, Any]:
        def step(nan: Array, i: Index | int) -> tuple[Array, Any]:
            own = arrays._replace(key_nan=nan)
            found = in_tile(WideTile.of(own, division, part, span, i))
            # One tile after the other, since there is memory for one.
            return lax.optimization_barrier((nan, found))

        nan, found = _scan(division, span.count, step, nan)
        return nan, _join_tiles(found)

    _, found = _over_spans(division, in_span, arrays.key_nan)
    return found


def _output(tile: WideTile) -> Float[Array, "b t n v"]:
    masked, _ = tile.scores()
    return _applied(tile, tile.softmax(masked)).astype(tile.call.query.dtype)


def _softmax(dtype: jnp.dtype, tile: WideTile) -> Softmax:
    masked, _ = tile.scores()
    found = tile.softmax(masked)
    top, total = (rearrange(x, "b k t g 1 -> b t (k g) 1") for x in (found.top, found.total))
    return Softmax(_applied(tile, found).astype(dtype), top, total)


def _applied(tile: WideTile, found: TileSoftmax) -> Float[Array, "b t n v"]:
    factors = tile.dropout_factors()
    weights = found.weights if factors is None else found.weights * factors
    return tile.of_keys(weights, tile.arrays.value)


def _gradients(call: Call, rows: Rows) -> Floats:
    # Else XLA would keep what forward computed of every tile, for all of them at once.
    call, rows = lax.optimization_barrier((call, rows))
    dtype = accumulation_dtype(call.query.dtype)
    arrays = prepared(call)
    division = divided(call, BACKWARD, UNROLLED)

    def in_span(sums: Floats, part: Index | int, span: Span) -> tuple[Floats, Any]:
        def step(sums: Floats, i: Index | int) -> tuple[Floats, Array]:
            tile = WideTile.of(arrays, division, part, span, i)
            query, sums = _backward_tile(tile, tile.rows(rows), sums)
            return lax.optimization_barrier((sums, query))

        # The loop adds up the gradients of its own keys, which a product can do by itself.
        first = WideTile.of(arrays, division, part, span, 0)
        key, value = first.take_keys(sums.key), first.take_keys(sums.value)
        found, query = _scan(division, span.count, step, sums._replace(key=key, value=value))
        key, value = (
            put(x, own, first.key_start)
            for x, own in ((sums.key, found.key), (sums.value, found.value))
        )
        return found._replace(key=key, value=value), _join_tiles(query)

    shared = call.floats._replace(key=arrays.key, value=arrays.value)
    if not isinstance(call.scale, jax.Array):
        shared = shared._replace(scale=None)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), shared)
    sums, query = _over_spans(division, in_span, zeros._replace(query=None))
    d_key, d_value = (rearrange(x, "b k s h -> b s k h") for x in (sums.key, sums.value))
    return sums._replace(
        query=_where_finite(call.query, query),
        key=_where_finite(call.key, d_key * call.scale),
        value=_where_finite(call.value, d_value),
    )


def _rows(call: Call, output: Array, cotangent: Array) -> Rows:
    dtype = accumulation_dtype(call.query.dtype)
    delta = (output.astype(dtype) * cotangent.astype(dtype)).sum(axis=-1)
    return Rows(cotangent, rearrange(delta, "b t (k g) -> b k t g 1", k=call.key.shape[2]))


def _share(total: Array) -> Array:
    empty = total == 0
    return jnp.where(empty, 0, 1 / jnp.where(empty, 1, total))


def _backward_tile(tile: WideTile, rows: Rows, sums: Floats) -> tuple[Array, Floats]:
    # The gradient of its queries, and the sums with those of all else.
    call, arrays = tile.call, tile.arrays
    masked, capped = tile.scores()
    top, share = rows.top, rows.share
    if top is None or share is None:
        weights, top, total = tile.softmax(masked)
        share = _share(total)
    else:
        weights = jnp.exp(masked - top) * share
    # Zero where hidden, also in a row that is NaN.
    weights = jnp.where(masked == -jnp.inf, 0, weights)
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
    pairs = zip(sums.captured, found.captured, strict=True)
    gradients = sums._replace(
        key=sums.key + tile.of_queries(d_scores, tile.clean_query()),
        value=sums.value + tile.of_queries(dropped, rows.cotangent),
        bias=_with_bias(sums.bias, tile, found.scores),
        sinks=_with_sinks(sums.sinks, tile, top, share * rows.delta),
        scale=_with_scale(sums.scale, tile.clean_query(), d_query),
        captured=tuple(total + d.astype(total.dtype) for total, d in pairs),
    )
    return (d_query * call.scale).astype(call.query.dtype), gradients


def _with_bias(bias: Array | None, tile: WideTile, d_scores: Array) -> Array | None:
    if bias is None:
        return None
    shared = tuple(axis for axis, size in enumerate(bias.shape) if size == 1)
    part = tile.ungrouped(d_scores).sum(axis=shared, keepdims=True)
    return add(bias, part, tile.start(bias.shape))


def _with_scale(scale: Array | None, query: Array, d_query: Array) -> Array | None:
    if scale is None:
        return None
    query = rearrange(query, "b t k g h -> b t (k g) h").astype(d_query.dtype)
    return scale + (d_query * query).sum()


def _with_sinks(sums: Array | None, tile: WideTile, top: Array, shares: Array) -> Array | None:
    # A sink has the gradient `-sum w delta`, w being its weight; `shares` are delta over the sum.
    sinks = tile.sinks()
    if sums is None or sinks is None:
        return None
    part = (jnp.exp(sinks - top) * shares).sum(axis=(0, 2, 4)).reshape(-1)
    return add(sums, -part, tile.first[1:2])


def _where_finite(x: Array, gradient: Array) -> Array:
    return jnp.where(finite_tokens(x)[..., None], gradient, 0)


def _over_spans(
    division: Division, in_span: Callable[[Any, Index | int, Span], tuple], carry: Any
) -> tuple[Any, Any]:
    """Return `carry` after every span, and what was found in them, joined to `(b, t, n, _)`."""

    def in_part(carry: Any, part: Index | int) -> tuple[Any, Any]:
        pieces = []
        for span in division.spans:
            carry, found = in_span(carry, part, span)
            pieces.append(found)
        return carry, jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *pieces)

    carry, parts = _scan(division, division.parts, in_part, carry)
    return carry, jax.tree.map(partial(_join_parts, division), parts)


def _scan(
    division: Division, count: int, step: Callable[[Any, Any], tuple], carry: Any
) -> tuple[Any, Any]:
    # XLA knows how often such a loop runs, so that the host does not wait for it.
    if not division.unrolled and count > 1:
        return lax.scan(step, carry, jnp.arange(count, dtype=jnp.int32))
    every = []
    for i in range(count):
        carry, found = step(carry, i)
        every.append(found)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *every)


def _join_tiles(tiles: Any) -> Any:
    return jax.tree.map(lambda x: rearrange(x, "i b t n w -> b (i t) n w"), tiles)


def _join_parts(division: Division, parts: Float[Array, "i b t n w"]) -> Array:
    # A part is some rows of the batch whole, or some heads of one row.
    return rearrange(parts, "(p j) b t n w -> (p b) t (j n) w", j=division.head_parts)


def batched_memory(call: Call) -> int:
    """Return the bytes of a tile's scores and weights, of clean keys, and of the output twice."""
    b, n, t, _ = call.shape
    itemsize, width = call.query.dtype.itemsize, call.value.shape[3]
    sums = accumulation_dtype(call.query.dtype).itemsize
    division = divided(call, FORWARD, UNROLLED)
    group = call.query.shape[2] // call.key.shape[2]
    tile = division.batch * division.heads * group * division.largest
    keys = (call.key.size + call.value.size) * itemsize
    return tile * (sums + itemsize) + keys + b * n * t * (width * itemsize + 2 * sums)


def batched_work(call: Call) -> KernelWork:
    """Return the work of all tiles: two products each, and weights; and of clean keys."""
    b, n, _, _ = call.shape
    division = divided(call, FORWARD, UNROLLED)
    pairs = sum(span.count * span.rows * span.cols for span in division.spans)
    tiles = division.parts * sum(span.count for span in division.spans)
    sums = accumulation_dtype(call.query.dtype).itemsize
    # Scores and weights are written once, and read once.
    both = b * n * pairs * (sums + call.query.dtype.itemsize)
    flops, moved = products(call, pairs), arrays_moved(call) + both
    apart = both + 3 * arrays_read(call)
    return KernelWork(4 * tiles + 12, flops, moved, apart, is_float32(call))
