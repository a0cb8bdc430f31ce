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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float

from flax_attn.backends.blocked.slices import add, put
from flax_attn.backends.blocked.spans import Division, Span, divided
from flax_attn.backends.blocked.wide_tile import (
    Place,
    Prepared,
    Rows,
    TileSoftmax,
    WideTile,
    prepared,
)
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
    top = rearrange(found.top, "b t n 1 -> b n t 1")
    total = rearrange(found.total, "b t n 1 -> b n t 1")
    return Softmax(found.output, top, total)


def backward_batched(call: Call, saved: Softmax, cotangent: Array) -> Floats:
    """Return the gradients, where the keys may be a part of those that `saved` is over."""
    rows = _rows(call, saved.output, cotangent)
    grouped = partial(rearrange, pattern="b (k g) t 1 -> b k t g 1", k=call.key.shape[2])
    top, total = grouped(saved.top), grouped(saved.total)
    return _gradients(call, rows._replace(top=top, share=_share(total)))


def _over_tiles(call: Call, in_tile: Callable[[WideTile], Any]) -> Any:
    # What is found in all tiles, arrays `(b, t, n, _)`.
    arrays = prepared(call)
    division = divided(call, FORWARD, UNROLLED)

    def step(nan: Array, place: Place) -> tuple[Array, Any]:
        tile = WideTile.of(arrays._replace(key_nan=nan), division, place)
        # One tile after the other, since there is memory for one.
        return lax.optimization_barrier((nan, in_tile(tile)))

    _, found = _over_spans(division, partial(_over_span, division, step), arrays.key_nan)
    return found


def _output(tile: WideTile) -> Float[Array, "b k t g v"]:
    masked, _ = tile.scores()
    return _applied(tile, tile.softmax(masked)).astype(tile.call.query.dtype)


def _softmax(dtype: jnp.dtype, tile: WideTile) -> Softmax:
    masked, _ = tile.scores()
    found = tile.softmax(masked)
    return Softmax(_applied(tile, found).astype(dtype), found.top, found.total)


def _applied(tile: WideTile, found: TileSoftmax) -> Float[Array, "b k t g v"]:
    weights = _times(found.weights, tile.dropout_factors())
    return tile.of_keys(weights, tile.arrays.value)


def _times(x: Array, factors: Array | None) -> Array:
    return x if factors is None else x.astype(factors.dtype) * factors


def _gradients(call: Call, rows: Rows) -> Floats:
    # Else XLA would keep what forward computed of every tile, for all of them at once. A tile reads
    # its queries twice, and takes them out of each array by a product itself.
    key, value, again = lax.optimization_barrier(
        (call.key, call.value, (call.query, rows.cotangent))
    )
    call, rows = replace(call, key=key, value=value), rows._replace(again=again)
    one = _BackwardPass(prepared(call), rows, divided(call, BACKWARD, UNROLLED))
    sums, _ = _over_spans(one.division, one.in_span, one.zeros())
    d_key, d_value = (rearrange(x, "b k s h -> b s k h") for x in (sums.key, sums.value))
    return sums._replace(
        query=_where_finite(call.query, sums.query),
        key=_where_finite(call.key, d_key * call.scale),
        value=_where_finite(call.value, d_value),
    )


@dataclass(frozen=True)
class _BackwardPass:
    arrays: Prepared
    rows: Rows
    division: Division

    def zeros(self) -> Floats:
        # The gradients that tiles add to, with keys and values as tiles have them, and that of the
        # queries, of which each tile writes its own.
        call = self.arrays.call
        dtype = accumulation_dtype(call.query.dtype)
        shared = call.floats._replace(query=None, key=self.arrays.key, value=self.arrays.value)
        if not isinstance(call.scale, jax.Array):
            shared = shared._replace(scale=None)
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), shared)
        return sums._replace(query=jnp.zeros_like(call.query))

    def in_span(self, sums: Floats, part: Index | int, span: Span) -> tuple[Floats, None]:
        # The loop adds up the gradients of its own keys, which a product can do by itself.
        first = self.tile(Place(part, span, 0))
        key, value = first.take_keys(sums.key), first.take_keys(sums.value)
        own = sums._replace(key=key, value=value)
        found, _ = _over_span(self.division, self.step, own, part, span)
        key = put(sums.key, found.key, first.key_start)
        value = put(sums.value, found.value, first.key_start)
        return found._replace(key=key, value=value), None

    def tile(self, place: Place) -> WideTile:
        return WideTile.of(self.arrays, self.division, place)

    def step(self, sums: Floats, place: Place) -> tuple[Floats, None]:
        tile = self.tile(place)
        found = _backward_tile(tile, tile.rows(self.rows), sums)
        return lax.optimization_barrier(found), None


def _rows(call: Call, output: Array, cotangent: Array) -> Rows:
    dtype = accumulation_dtype(call.query.dtype)
    delta = (output.astype(dtype) * cotangent.astype(dtype)).sum(axis=-1)
    return Rows(cotangent, rearrange(delta, "b t (k g) -> b k t g 1", k=call.key.shape[2]))


def _share(total: Array) -> Array:
    empty = total == 0
    return jnp.where(empty, 0, 1 / jnp.where(empty, 1, total))


def _backward_tile(tile: WideTile, rows: Rows, sums: Floats) -> Floats:
    # The sums with the gradients of a tile.
    call = tile.call
    masked, capped = tile.scores()
    weights, top, share = _weights(tile, rows, masked)
    factors = tile.dropout_factors()
    query, cotangent = rows.again
    d_value = sums.value + tile.of_queries(_times(weights, factors), cotangent)
    # Then the weights are read for the gradient of the scores alone, which takes their memory.
    d_value, weights, value = lax.optimization_barrier((d_value, weights, tile.arrays.value))
    d_weights = _times(tile.with_keys(rows.cotangent, value), factors)
    found = score_gradients(
        weights.astype(d_weights.dtype),
        d_weights,
        rows.delta,
        capped,
        call.soft_cap,
        pull=None if call.score is None else tile.pull,
    )
    d_scores = lax.optimization_barrier(found.scores.astype(call.query.dtype))
    d_query = tile.of_keys(d_scores, tile.arrays.key)
    return Floats(
        query=put(sums.query, tile.tokens_first(d_query * call.scale), tile.query_start),
        key=sums.key + tile.of_queries(d_scores, tile.clean(query)),
        value=d_value,
        bias=_with_bias(sums.bias, tile, found.scores),
        sinks=_with_sinks(sums.sinks, tile, top, share * rows.delta),
        scale=_with_scale(sums.scale, tile.clean(query), d_query),
        captured=tuple(map(_add, sums.captured, found.captured)),
    )


def _weights(tile: WideTile, rows: Rows, masked: Array) -> tuple[Array, Array, Array]:
    # The weights in the dtype of products, and the maximum and one over the sum of each row.
    top, share = rows.top, rows.share
    if top is None or share is None:
        weights, top, total = tile.softmax(masked)
        share = _share(total)
    else:
        weights = jnp.exp(masked - top) * share
    # Zero where hidden, also in a row that is NaN.
    weights = jnp.where(masked == -jnp.inf, 0, weights)
    # In this dtype the scores need no memory beyond this.
    return lax.optimization_barrier(weights.astype(tile.call.query.dtype)), top, share


def _add(total: Array, part: Array) -> Array:
    return total + part.astype(total.dtype)


def _with_bias(bias: Array | None, tile: WideTile, d_scores: Array) -> Array | None:
    if bias is None:
        return None
    shared = tuple(axis for axis, size in enumerate(bias.shape) if size == 1)
    part = tile.ungrouped(d_scores).sum(axis=shared, keepdims=True)
    return add(bias, part, tile.start(bias.shape))


def _with_scale(scale: Array | None, query: Array, d_query: Array) -> Array | None:
    if scale is None:
        return None
    query = rearrange(query, "b t k g h -> b k t g h")
    return scale + (d_query * query.astype(d_query.dtype)).sum()


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
        return carry, jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *pieces)

    carry, parts = _scan(division, division.parts, in_part, carry)
    return carry, jax.tree.map(partial(_join_parts, division), parts)


def _over_span(
    division: Division,
    step: Callable[[Any, Place], tuple],
    carry: Any,
    part: Index | int,
    span: Span,
) -> tuple[Any, Any]:
    """Return `carry` after the tiles of a span, and what was found in them, `(b, k, t, g, _)`."""

    def one(carry: Any, i: Index | int) -> tuple[Any, Any]:
        return step(carry, Place(part, span, i))

    carry, tiles = _scan(division, span.count, one, carry)
    return carry, jax.tree.map(lambda x: rearrange(x, "i b k t g w -> b k (i t) g w"), tiles)


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


def _join_parts(division: Division, parts: Float[Array, "i b k t g w"]) -> Array:
    # A part is some rows of the batch whole, or some heads of one row.
    axes = "(p j) b k t g w -> (p b) t (j k g) w"
    return rearrange(parts, axes, j=division.head_parts)


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
