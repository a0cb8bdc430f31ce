"""A tile of many heads: its scores and weights, and its products.

A number that is not finite turns the scores of the pairs that see it into NaN: no test, and no
branch for which the host would wait.

Scores are `(b, k, t, g, s)`: XLA multiplies the queries of a group where they lie, and computes the
softmax of a row in one kernel, with what the mask shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float

from flax_attn.backends.blocked.prepared import Prepared, part_of
from flax_attn.backends.blocked.slices import put, take
from flax_attn.backends.blocked.spans import Division, Span
from flax_attn.backends.call import Call, Floats
from flax_attn.backends.tile import TileScores, scores
from flax_attn.functional.dropout import keep_mask
from flax_attn.functional.shapes import Index
from flax_attn.functional.traced_score import TracedScore

GroupedScores = Float[Array, "b k t g s"]


class Rows(NamedTuple):
    """What the backward pass reads of queries.

    Args:
        cotangent: gradient of the output, `(b, t, n, v)`; of a tile `(b, t, k, g, v)`.
        delta: sum of the output times its gradient, `(b, k, t, g, 1)`.
        top: maximum of the softmax over all keys, likewise; None where a tile has all of them.
        share: one over its sum, or None.
        again: query and gradient of the output, for the sums over queries.
    """

    cotangent: Array
    delta: Array
    top: Array | None = None
    share: Array | None = None
    again: tuple[Array, Array] | None = None


class TileSoftmax(NamedTuple):
    """The softmax of a tile that holds all keys of its queries.

    Args:
        weights: weights `(b, k, t, g, s)`.
        top: maximum `(b, k, t, g, 1)`.
        total: sum, likewise.
    """

    weights: GroupedScores
    top: Array
    total: Array


class Place(NamedTuple):
    """Tile `i` of a span of a part."""

    part: Index | int
    span: Span
    i: Index | int

    def first(self, call: Call, division: Division) -> tuple[Index | int, ...]:
        """Return the index of its first row of the batch, query head, query and key."""
        group = call.query.shape[2] // call.key.shape[2]
        b = self.part // division.head_parts * division.batch
        k = self.part % division.head_parts * division.heads
        return b, k * group, self.span.row + self.i * self.span.rows, self.span.col


@dataclass(frozen=True)
class WideTile:
    """Some queries of some heads, and all keys that they may see.

    Args:
        arrays: arrays of these queries and keys.
        first: index of its first row of the batch, query head, query and key.
        group: number of query heads that share a key/value head.
    """

    arrays: Prepared
    first: tuple[Index | int, ...]
    group: int

    @staticmethod
    def of(arrays: Prepared, division: Division, place: Place) -> WideTile:
        """Return the tile at a place."""
        first = place.first(arrays.call, division)
        group = arrays.call.query.shape[2] // arrays.call.key.shape[2]
        span = place.span
        sizes = division.batch, division.heads * group, span.rows, span.cols
        return WideTile(part_of(arrays, first, sizes, group), first, group)

    @property
    def call(self) -> Call:
        """The whole call."""
        return self.arrays.call

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes `(b, n, t, s)` of its scores."""
        b, t, k, g, _ = self.arrays.query.shape
        return b, k * g, t, self.arrays.key.shape[2]

    def clean(self, query: Float[Array, "b t k g h"]) -> Float[Array, "b t k g h"]:
        """Return queries with zeros for those that are not finite."""
        finite = rearrange(self.arrays.query_nan == 0, "b k t g 1 -> b t k g 1")
        return jnp.where(finite, query, 0)

    def rows(self, all_rows: Rows) -> Rows:
        """Return the rows of its queries."""
        cotangent, *columns, again = all_rows
        delta, top, share = jax.tree.map(self._own_rows, columns)
        again = jax.tree.map(self._own_queries, again)
        return Rows(self._own_queries(cotangent), delta, top, share, again)

    def _own_queries(self, x: Float[Array, "b t n w"]) -> Float[Array, "b t k g w"]:
        b, n, t, _ = self.shape
        own = take(x, self.query_start, (b, t, n, x.shape[3]))
        return rearrange(own, "b t (k g) w -> b t k g w", g=self.group)

    def _own_rows(self, x: Float[Array, "b k t g 1"]) -> Float[Array, "b k t g 1"]:
        b, n, row, _ = self.first
        rows, heads, t, _ = self.shape
        shape = rows, heads // self.group, t, self.group, 1
        return take(x, (b, n // self.group, row, 0, 0), shape)

    def take_keys(self, x: Array) -> Array:
        """Return the keys of an array `(b, k, s, _)`."""
        return take(x, self.key_start, (*self.arrays.key.shape[:3], x.shape[3]))

    def put_keys(self, sums: Floats, own: Floats) -> Floats:
        """Return sums with those of its keys in their place."""
        key = put(sums.key, own.key, self.key_start)
        value = put(sums.value, own.value, self.key_start)
        return own._replace(key=key, value=value)

    def scores(self) -> TileScores:
        """Return the scores, NaN where a number that is seen is not finite."""
        call, arrays = self.call, self.arrays
        function = None if call.score is None else self._changed
        dtype = arrays.query_nan.dtype
        return scores(
            products=self.with_keys(arrays.query, arrays.key) * call.scale,
            bias=None if call.bias is None else self._own(call.bias).astype(dtype),
            visible=self._visible() if call.mask.parts else None,
            soft_cap=call.soft_cap,
            function=function,
            more=arrays.query_nan + arrays.key_nan,
        )

    def softmax(self, masked: GroupedScores) -> TileSoftmax:
        """Return the softmax of its scores, which are over all keys of its queries."""
        top, sinks = _maximum(masked), self.sinks()
        top = top if sinks is None else jnp.maximum(top, sinks)
        exps = jnp.exp(masked - top)
        total = exps.sum(axis=-1, keepdims=True)
        total = total if sinks is None else total + jnp.exp(sinks - top)
        return TileSoftmax(exps / jnp.where(total == 0, 1, total), top, total)

    def sinks(self) -> Array | None:
        """Return the sinks `(1, k, 1, g, 1)` in the dtype of the scores, or None."""
        if self.call.sinks is None:
            return None
        sinks = take(self.call.sinks, self.first[1:2], self.shape[1:2])
        sinks = sinks.astype(self.arrays.query_nan.dtype)
        return rearrange(sinks, "(k g) -> 1 k 1 g 1", g=self.group)

    def dropout_factors(self) -> Array | None:
        """Return the factors of dropout: 0 or `1 / (1 - rate)`."""
        dropout = self.call.dropout
        if dropout is None:
            return None
        rows, heads, _, _ = self.shape
        b = self.first[0] + jnp.arange(rows, dtype=jnp.int32)
        n = self.first[1] + jnp.arange(heads, dtype=jnp.int32)
        keep = keep_mask(
            dropout,
            rearrange(b, "b -> b 1 1 1 1"),
            rearrange(n, "(k g) -> 1 k 1 g 1", g=self.group),
            rearrange(self.arrays.rows, "t -> 1 1 t 1 1"),
            rearrange(self.arrays.cols, "s -> 1 1 1 1 s"),
        )
        return jnp.where(keep, 1 / (1 - dropout.rate), 0).astype(self.arrays.query_nan.dtype)

    def pull(self, scores: Array, cotangent: Array) -> tuple[Array, tuple[Array, ...]]:
        """Return the gradients of the scores and of the arrays that the function captures."""
        floats = self._score().floats
        _, gradients = jax.vjp(self._changed, scores, floats)
        return gradients(cotangent)

    def with_keys(self, queries: Float[Array, "b t k g w"], keys: Array) -> GroupedScores:
        """Return the products of each query with each key."""
        return self._product("b t k g w, b k s w -> b k t g s", queries, keys)

    def of_keys(self, weights: GroupedScores, keys: Array) -> Float[Array, "b k t g w"]:
        """Return the sums over the keys."""
        return self._product("b k t g s, b k s w -> b k t g w", weights, keys)

    def of_queries(self, weights: GroupedScores, queries: Array) -> Float[Array, "b k s w"]:
        """Return the sums over the queries of the heads that share a key/value head."""
        return self._product("b k t g s, b t k g w -> b k s w", weights, queries)

    def tokens_first(self, x: Float[Array, "b k t g w"]) -> Float[Array, "b t n w"]:
        """Return numbers of its queries as a call has them."""
        return rearrange(x, "b k t g w -> b t (k g) w")

    def ungrouped(self, x: GroupedScores) -> Float[Array, "b n t s"]:
        """Return scores as a call has them."""
        return rearrange(x, "b k t g s -> b (k g) t s")

    def start(self, shape: tuple[int, ...]) -> list[Index | int]:
        """Return where it begins in an array `(#b, #n, #t, #s)`; an axis of one serves all."""
        return [0 if size == 1 else i for size, i in zip(shape, self.first, strict=True)]

    @property
    def query_start(self) -> tuple[Index | int, ...]:
        """Where it begins in an array `(b, t, n, _)`."""
        b, n, row, _ = self.first
        return b, row, n, 0

    @property
    def key_start(self) -> tuple[Index | int, ...]:
        """Where it begins in an array `(b, k, s, _)`."""
        b, n, _, col = self.first
        return b, n // self.group, col, 0

    def _own(self, x: Array) -> Array:
        # The part of an array that broadcasts to all scores.
        return self._grouped(take(x, self.start(x.shape), tuple(map(min, x.shape, self.shape))))

    def _visible(self) -> Bool[Array, "#b #k #t #g #s"]:
        visible = self.call.mask.block(self.arrays.rows, self.arrays.cols)
        heads = tuple(map(min, visible.shape[:2], self.shape[:2]))
        at = *self.start((*visible.shape[:2], 1, 1))[:2], 0, 0
        return self._grouped(take(visible, at, (*heads, *visible.shape[2:])))

    def _changed(self, scores: GroupedScores, floats: tuple[Array, ...] | None = None) -> Array:
        # What the function of scores makes of them, with other arrays than it captured.
        score = self._score()
        score = score if floats is None else score.with_floats(floats)
        return self._grouped(score.apply(self.ungrouped(scores)))

    def _score(self) -> TracedScore:
        score = self.call.score
        assert score is not None
        b, n, row, col = self.first
        rows, heads, t, s = self.shape
        return replace(
            score,
            b=take(score.b, (b,), (rows,)),
            n=take(score.n, (n,), (heads,)),
            rows=self._positions(score.rows, row, t),
            cols=self._positions(score.cols, col, s),
        )

    def _positions(self, x: Array, first: Index | int, size: int) -> Array:
        # Those of one row of the batch serve all.
        if len(x) == 1:
            return take(x, (0, first), (1, size))
        return take(x, (self.first[0], first), (self.shape[0], size))

    def _product(self, axes: str, a: Array, b: Array) -> Array:
        # On tensor cores lower dtypes are multiplied as they are.
        low, sums = self.call.query.dtype, self.arrays.query_nan.dtype
        options = {"precision": self.call.precision, "preferred_element_type": sums}
        return jnp.einsum(axes, a.astype(low), b.astype(low), **options)

    def _grouped(self, x: Array) -> Array:
        # An array `(#b, #n, #t, #s)`, whose axis of heads may serve all.
        group = 1 if x.shape[1] == 1 else self.group
        return rearrange(x, "b (k g) t s -> b k t g s", g=group)


def _maximum(masked: GroupedScores) -> Float[Array, "b k t g 1"]:
    # Of a row that sees nothing it is a number that can be subtracted from itself.
    lowest = jnp.finfo(masked.dtype).min.astype(masked.dtype)
    return lax.reduce(masked, lowest, lax.max, (4,))[..., None]
