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

from flax_attn.backends.blocked.prepared import Prepared, prepared
from flax_attn.backends.blocked.slices import add, add_as, put
from flax_attn.backends.blocked.spans import Division, Span, divided
from flax_attn.backends.blocked.tile_loops import over_span, over_spans
from flax_attn.backends.blocked.wide_tile import Place, Rows, TileSoftmax, WideTile
from flax_attn.backends.call import Call, Floats
from flax_attn.backends.softmax import Softmax, reciprocal
from flax_attn.backends.tile import score_gradients, times
from flax_attn.backends.work import (
    KernelWork,
    arrays_moved,
    arrays_read,
    drawn,
    is_float32,
    products,
)
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.nonfinite import finite_tokens
from flax_attn.functional.shapes import Index

# Scores of a tile: of float32 once, and of weights and gradients in the dtype of the call.
FORWARD, BACKWARD = 2**26, 3 * 2**24
UNROLLED = 48  # tiles: more of them are looped over

# The gradients that tiles add to, and what is added to the scores of keys that are not finite.
_Carry = tuple[Floats, Array]


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
    return _gradients(call, rows._replace(top=top, share=reciprocal(total)))


def _over_tiles(call: Call, in_tile: Callable[[WideTile], Any]) -> Any:
    # What is found in all tiles, arrays `(b, t, n, _)`.
    arrays = prepared(call)
    division = divided(call, FORWARD, UNROLLED)
    step = partial(_forward_step, arrays, division, in_tile)
    in_span = partial(over_span, division, step)
    return over_spans(division, in_span, arrays.key_nan)[1]


def _forward_step(
    arrays: Prepared, division: Division, in_tile: Callable, nan: Array, place: Place
) -> tuple[Array, Any]:
    tile = WideTile.of(arrays._replace(key_nan=nan), division, place)
    # One tile after the other, since there is memory for one.
    return lax.optimization_barrier((nan, in_tile(tile)))


def _output(tile: WideTile) -> Float[Array, "b k t g v"]:
    masked, _ = tile.scores()
    return _applied(tile, tile.softmax(masked)).astype(tile.call.query.dtype)


def _softmax(dtype: jnp.dtype, tile: WideTile) -> Softmax:
    masked, _ = tile.scores()
    found = tile.softmax(masked)
    return Softmax(_applied(tile, found).astype(dtype), found.top, found.total)


def _applied(tile: WideTile, found: TileSoftmax) -> Float[Array, "b k t g v"]:
    weights = times(found.weights, tile.dropout_factors())
    return tile.of_keys(weights, tile.arrays.value)


def _gradients(call: Call, rows: Rows) -> Floats:
    one = _backward_pass(call, rows)
    (sums, _), _ = over_spans(one.division, one.in_span, (one.zeros(), one.arrays.key_nan))
    return sums._replace(
        key=_of_keys(call.key, sums.key * call.scale),
        value=_of_keys(call.value, sums.value),
    )


def _of_keys(x: Float[Array, "b s k w"], gradient: Float[Array, "b k s w"]) -> Array:
    # Zero for tokens that are not finite.
    gradient = rearrange(gradient, "b k s w -> b s k w")
    return jnp.where(finite_tokens(x)[..., None], gradient, 0)


def _backward_pass(call: Call, rows: Rows) -> _BackwardPass:
    # Else XLA would keep what forward computed of every tile, for all of them at once. A tile reads
    # its queries twice, and a product takes them out of an array that it alone reads.
    held, cotangent = lax.optimization_barrier((call, rows.cotangent))
    arrays = prepared(replace(held, query=call.query))
    rows = rows._replace(again=(held.query, cotangent))
    return _BackwardPass(arrays, rows, divided(call, BACKWARD, UNROLLED))


@dataclass(frozen=True)
class _BackwardPass:
    arrays: Prepared
    rows: Rows
    division: Division

    def zeros(self) -> Floats:
        # The gradients that tiles add to, with keys and values as tiles have them, and that of the
        # queries, of which each tile writes its own.
        call = self.arrays.call
        scale = call.scale if isinstance(call.scale, jax.Array) else None
        zeros = partial(jnp.zeros_like, dtype=accumulation_dtype(call.query.dtype))
        shared = call.floats._replace(query=None, key=self.arrays.key, value=self.arrays.value)
        sums = jax.tree.map(zeros, shared._replace(scale=scale))
        return sums._replace(query=jnp.zeros_like(call.query))

    def in_span(self, carry: _Carry, part: Index | int, span: Span) -> tuple[_Carry, None]:
        # The loop adds up the gradients of its own keys, which a product can do by itself.
        sums, nan = carry
        first = self.tile(Place(part, span, 0), nan)
        key, value = first.take_keys(sums.key), first.take_keys(sums.value)
        own = sums._replace(key=key, value=value)
        (found, nan), _ = over_span(self.division, self.step, (own, nan), part, span)
        return (first.put_keys(sums, found), nan), None

    def tile(self, place: Place, nan: Array) -> WideTile:
        return WideTile.of(self.arrays._replace(key_nan=nan), self.division, place)

    def step(self, carry: _Carry, place: Place) -> tuple[_Carry, None]:
        sums, nan = carry
        tile = self.tile(place, nan)
        found = _backward_tile(tile, tile.rows(self.rows), sums)
        # One tile after the other, as forward.
        return lax.optimization_barrier((found, nan)), None


def _rows(call: Call, output: Array, cotangent: Array) -> Rows:
    dtype = accumulation_dtype(call.query.dtype)
    delta = (output.astype(dtype) * cotangent.astype(dtype)).sum(axis=-1)
    return Rows(cotangent, rearrange(delta, "b t (k g) -> b k t g 1", k=call.key.shape[2]))


def _backward_tile(tile: WideTile, rows: Rows, sums: Floats) -> Floats:
    # The sums with the gradients of a tile.
    call = tile.call
    masked, capped = tile.scores()
    weights, top, share = _weights(tile, rows, masked)
    assert rows.again is not None, "the pass sets it"
    query, cotangent = rows.again
    d_value = sums.value + tile.of_queries(times(weights, tile.dropout_factors()), cotangent)
    # What comes before is done before; dropout is drawn again, since XLA would keep its factors.
    indices = None if call.dropout is None else tile.arrays.rows
    held = d_value, weights, tile.arrays.value, indices
    d_value, weights, value, indices = lax.optimization_barrier(held)
    again = tile if indices is None else replace(tile, arrays=tile.arrays._replace(rows=indices))
    d_weights = times(tile.with_keys(rows.cotangent, value), again.dropout_factors())
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
    own = jnp.where(tile.arrays.query_nan == 0, d_query * call.scale, 0)
    return Floats(
        query=put(sums.query, tile.tokens_first(own), tile.query_start),
        key=sums.key + tile.of_queries(d_scores, tile.clean(query)),
        value=d_value,
        bias=_with_bias(sums.bias, tile, found.scores),
        sinks=_with_sinks(sums.sinks, tile, top, share * rows.delta),
        scale=_with_scale(sums.scale, tile.clean(query), d_query),
        captured=tuple(map(add_as, sums.captured, found.captured)),
    )


def _weights(tile: WideTile, rows: Rows, masked: Array) -> tuple[Array, Array, Array]:
    # The weights in the dtype of products, and the maximum and one over the sum of each row.
    weights, top, share = _normalised(tile, rows, masked)
    # Zero where hidden, also in a row that is NaN.
    weights = jnp.where(masked == -jnp.inf, 0, weights)
    # In this dtype the scores need no memory beyond this.
    return lax.optimization_barrier(weights.astype(tile.call.query.dtype)), top, share


def _normalised(tile: WideTile, rows: Rows, masked: Array) -> tuple[Array, Array, Array]:
    top, share = rows.top, rows.share
    if top is not None and share is not None:
        return jnp.exp(masked - top) * share, top, share
    weights, top, total = tile.softmax(masked)
    return weights, top, reciprocal(total)


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


def batched_memory(call: Call) -> int:
    """Return the bytes of a tile's scores and weights, of clean keys, and of the output twice."""
    b, n, t, _ = call.shape
    itemsize, sums = _itemsizes(call)
    keys = (call.key.size + call.value.size) * itemsize
    row = call.value.shape[3] * itemsize + 2 * sums
    return _largest_tile(call) * (sums + itemsize) + keys + b * n * t * row


def _largest_tile(call: Call) -> int:
    division = divided(call, FORWARD, UNROLLED)
    group = call.query.shape[2] // call.key.shape[2]
    return division.batch * division.heads * group * division.largest


def _itemsizes(call: Call) -> tuple[int, int]:
    # Bytes of a number of the call, and of a score.
    dtype = call.query.dtype
    return dtype.itemsize, accumulation_dtype(dtype).itemsize


def batched_work(call: Call) -> KernelWork:
    """Return the work of all tiles: two products each, and weights; and of clean keys."""
    b, n, _, _ = call.shape
    division = divided(call, FORWARD, UNROLLED)
    pairs = sum(span.count * span.rows * span.cols for span in division.spans)
    tiles = division.parts * sum(span.count for span in division.spans)
    # Scores and weights are written once, and read once.
    both = b * n * pairs * sum(_itemsizes(call))
    return KernelWork(
        4 * tiles + 12,
        products(call, pairs),
        arrays_moved(call) + both,
        both + 3 * arrays_read(call),
        is_float32(call),
        drawn=drawn(call, pairs),
    )
