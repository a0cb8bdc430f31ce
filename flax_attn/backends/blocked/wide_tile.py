"""A tile of many heads: its scores and weights, and its products.

A number that is not finite turns the scores of the pairs that see it into NaN: no test, and no
branch for which the host would wait.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float

from flax_attn.backends.blocked.slices import take
from flax_attn.backends.blocked.spans import Division, Span
from flax_attn.backends.call import Call
from flax_attn.backends.tile import TileScores, scores
from flax_attn.functional.dropout import keep_mask
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.nonfinite import finite_tokens, zero_nonfinite
from flax_attn.functional.shapes import Index
from flax_attn.functional.traced_score import TracedScore


class Prepared(NamedTuple):
    """Query, key and value as tiles read them.

    Args:
        call: call that they are of.
        query: query `(b, t, n, h)` of the call; of a tile `(b, n, t, h)`.
        key: key `(b, k, s, h)`, with zeros for tokens that are not finite.
        value: value `(b, k, s, v)`, likewise.
        query_nan: NaN where a query is not finite, else 0.
        key_nan: NaN where a key or its value is not finite, else 0.
    """

    call: Call
    query: Array
    key: Float[Array, "b k s h"]
    value: Float[Array, "b k s v"]
    query_nan: Float[Array, "b n t 1"]
    key_nan: Float[Array, "b n 1 s"]


def prepared(call: Call, room: Array | float = 1) -> Prepared:
    """Return the arrays of a call as tiles read them, with values multiplied by `room`."""
    dtype = accumulation_dtype(call.query.dtype)
    group = call.query.shape[2] // call.key.shape[2]
    query_nan = jnp.where(finite_tokens(call.query), 0, jnp.nan).astype(dtype)
    key_ok = finite_tokens(call.key) & finite_tokens(call.value)
    key_nan = jnp.repeat(jnp.where(key_ok, 0, jnp.nan).astype(dtype), group, axis=2)
    return Prepared(
        call=call,
        query=call.query,
        key=rearrange(zero_nonfinite(call.key), "b s k h -> b k s h"),
        value=rearrange(zero_nonfinite(call.value) * room, "b s k v -> b k s v"),
        query_nan=rearrange(query_nan, "b t n -> b n t 1"),
        key_nan=rearrange(key_nan, "b s n -> b n 1 s"),
    )


class Rows(NamedTuple):
    """What the backward pass reads of queries, `(b, n, t, _)`; `share` is one over their sum.

    The cotangent of a whole call is `(b, t, n, v)`.
    """

    cotangent: Array
    top: Array
    share: Array
    delta: Array


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
    def of(
        arrays: Prepared, division: Division, part: Index | int, span: Span, i: Index | int
    ) -> WideTile:
        """Return tile `i` of a span of a part."""
        call = arrays.call
        group = call.query.shape[2] // call.key.shape[2]
        b = part // division.head_parts * division.batch
        k = part % division.head_parts * division.heads
        row = span.row + i * span.rows
        first = b, k * group, row, span.col
        rows, heads = (division.batch, division.heads * group), (division.batch, division.heads)
        query_nan = take(arrays.query_nan, (*first[:3], 0), (*rows, span.rows, 1))
        key_nan = take(arrays.key_nan, (*first[:2], 0, span.col), (*rows, 1, span.cols))

        def keys(x: Array) -> Array:
            return take(x, (b, k, span.col, 0), (*heads, span.cols, x.shape[3]))

        query = take(
            arrays.query,
            (b, row, k * group, 0),
            (rows[0], span.rows, rows[1], arrays.query.shape[3]),
        )
        query = rearrange(query, "b t n h -> b n t h")
        own = Prepared(call, query, keys(arrays.key), keys(arrays.value), query_nan, key_nan)
        return WideTile(own, first, group)

    @property
    def call(self) -> Call:
        """The whole call."""
        return self.arrays.call

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes `(b, n, t, s)` of its scores."""
        return *self.arrays.query.shape[:3], self.arrays.key.shape[2]

    @property
    def indices(self) -> tuple[Index, ...]:
        """The indices `(b, n, t, s)` of its scores."""
        return tuple(
            first + jnp.arange(size, dtype=jnp.int32)
            for first, size in zip(self.first, self.shape, strict=True)
        )

    def clean_query(self) -> Array:
        """Return the queries with zeros for those that are not finite."""
        return jnp.where(self.arrays.query_nan == 0, self.arrays.query, 0)

    def rows(self, all_rows: Rows) -> Rows:
        """Return the rows of its queries."""
        b, n, row, _ = self.first
        rows, heads, t, _ = self.shape
        width = all_rows.cotangent.shape[3]
        cotangent = take(all_rows.cotangent, self.query_start, (rows, t, heads, width))
        top, share, delta = (take(x, (b, n, row, 0), (rows, heads, t, 1)) for x in all_rows[1:])
        return Rows(rearrange(cotangent, "b t n v -> b n t v"), top, share, delta)

    def take_keys(self, x: Array) -> Array:
        """Return the keys of an array `(b, k, s, _)`."""
        return take(x, self.key_start, (*self.arrays.key.shape[:3], x.shape[3]))

    def scores(self) -> TileScores:
        """Return the scores, NaN where a number that is seen is not finite."""
        call, arrays = self.call, self.arrays
        function = None if call.score is None else self._score().apply
        dtype = arrays.query_nan.dtype
        return scores(
            products=self.with_keys(arrays.query, arrays.key) * call.scale,
            bias=None if call.bias is None else self._own(call.bias).astype(dtype),
            visible=self._visible() if call.mask.parts else None,
            soft_cap=call.soft_cap,
            function=function,
            more=arrays.query_nan + arrays.key_nan,
        )

    def sinks(self) -> Array | None:
        """Return the sinks `(1, n, 1, 1)` in the dtype of the scores, or None."""
        if self.call.sinks is None:
            return None
        sinks = take(self.call.sinks, self.first[1:2], self.shape[1:2])
        return rearrange(sinks.astype(self.arrays.query_nan.dtype), "n -> 1 n 1 1")

    def dropout_factors(self) -> Array | None:
        """Return the factors of dropout: 0 or `1 / (1 - rate)`."""
        dropout = self.call.dropout
        if dropout is None:
            return None
        indices = []
        for axis, index in enumerate(self.indices):
            others = tuple(x for x in range(4) if x != axis)
            indices.append(jnp.expand_dims(index, others))
        keep = keep_mask(dropout, *indices)
        return jnp.where(keep, 1 / (1 - dropout.rate), 0).astype(self.arrays.query_nan.dtype)

    def pull(self, scores: Array, cotangent: Array) -> tuple[Array, tuple[Array, ...]]:
        """Return the gradients of the scores and of the arrays that the function captures."""
        score = self._score()

        def changed(scores: Array, floats: tuple[Array, ...]) -> Array:
            return score.with_floats(floats).apply(scores)

        _, gradients = jax.vjp(changed, scores, score.floats)
        return gradients(cotangent)

    def with_keys(self, queries: Array, keys: Array) -> Float[Array, "b n t s"]:
        """Return the products of each query with each key."""
        found = self._product("b k g t h, b k s h -> b k g t s", self._grouped(queries), keys)
        return rearrange(found, "b k g t s -> b (k g) t s")

    def of_keys(self, weights: Array, keys: Array) -> Float[Array, "b n t h"]:
        """Return the sums over the keys."""
        found = self._product("b k g t s, b k s h -> b k g t h", self._grouped(weights), keys)
        return rearrange(found, "b k g t h -> b (k g) t h")

    def of_queries(self, weights: Array, queries: Array) -> Float[Array, "b k s h"]:
        """Return the sums over the queries of the heads that share a key/value head."""
        weights, queries = self._grouped(weights), self._grouped(queries)
        return self._product("b k g t s, b k g t h -> b k s h", weights, queries)

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
        return take(x, self.start(x.shape), tuple(map(min, x.shape, self.shape)))

    def _visible(self) -> Bool[Array, "#b #n #t #s"]:
        _, _, rows, cols = self.indices
        visible = self.call.mask.block(rows, cols)
        heads = tuple(map(min, visible.shape[:2], self.shape[:2]))
        at = *self.start((*visible.shape[:2], 1, 1))[:2], 0, 0
        return take(visible, at, (*heads, *visible.shape[2:]))

    def _score(self) -> TracedScore:
        score = self.call.score
        assert score is not None
        b, n, row, col = self.first
        rows, heads, t, s = self.shape

        def positions(x: Array, first: Index | int, size: int) -> Array:
            shared = len(x) == 1
            return take(x, (0 if shared else b, first), (1 if shared else rows, size))

        return replace(
            score,
            b=take(score.b, (b,), (rows,)),
            n=take(score.n, (n,), (heads,)),
            rows=positions(score.rows, row, t),
            cols=positions(score.cols, col, s),
        )

    def _product(self, axes: str, a: Array, b: Array) -> Array:
        # On tensor cores lower dtypes are multiplied as they are.
        low, sums = self.call.query.dtype, self.arrays.query_nan.dtype
        options = {"precision": self.call.precision, "preferred_element_type": sums}
        return jnp.einsum(axes, a.astype(low), b.astype(low), **options)

    def _grouped(self, x: Array) -> Float[Array, "b k g t w"]:
        return rearrange(x, "b (k g) t w -> b k g t w", g=self.group)
