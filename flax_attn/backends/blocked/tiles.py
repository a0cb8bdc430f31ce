"""The tiles of one head, for both passes: where they are, what is visible in them, their scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import groupby, pairwise
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from flax_attn.backends.blocked.slices import take
from flax_attn.backends.blocked.tiling import EdgeTile, Tiling
from flax_attn.functional.dropout import KeyedDropout, keep_mask
from flax_attn.functional.kv_range import KVRange
from flax_attn.functional.masks import Mask
from flax_attn.functional.traced_score import TracedScore

Carry = TypeVar("Carry")


@dataclass(frozen=True)
class Static:
    """What is known before tracing: the tiling, and how to compute.

    Args:
        tiling: division of queries and keys into tiles.
        soft_cap: soft cap on the scores, or None.
        precision: precision of the matrix products.
        operand: dtype that matrix products read.
        sums: dtype of sums and of the softmax.
    """

    tiling: Tiling
    soft_cap: float | None
    precision: Any
    operand: Any
    sums: Any

    @property
    def lowest(self) -> float:
        """The number below all scores; unlike -inf it can be subtracted from itself."""
        return float(jnp.finfo(self.sums).min)

    def dot(self, a: Array, b: Array) -> Array:
        """Return the matrix product of two matrices."""
        a, b = a.astype(self.operand), b.astype(self.operand)
        return jnp.matmul(a, b, precision=self.precision, preferred_element_type=self.sums)


class Head(NamedTuple):
    """One head of one batch row, padded to the tiling; query scaled.

    Shapes:
        query `(t, h)`, key `(s, h)`, value `(s, v)`; bias of rank 4 for all heads, or None; sink a
        scalar or None; mask without the band of the tiling, and score the function of scores or
        None, for this row and head; b and n the indices of this head.
    """

    query: Float[Array, "t h"]
    key: Float[Array, "s h"]
    value: Float[Array, "s v"]
    bias: Array | None
    score: TracedScore | None
    sink: Array | None
    mask: Mask
    dropout: KeyedDropout | None
    b: Array
    n: Array


class Tile(NamedTuple):
    """Queries from `row` and keys from `col`; `visible` is the mask, None if nothing is hidden."""

    row: Array
    rows: int
    col: Array
    cols: int
    visible: Bool[Array, "#t #s"] | None = None

    @property
    def indices(self) -> tuple[Array, Array]:
        """The indices of the queries and of the keys."""
        return self.row + jnp.arange(self.rows, dtype=jnp.int32), self.col + jnp.arange(
            self.cols, dtype=jnp.int32
        )


def starts(tiling: Tiling) -> Array:
    """Return the first query of every block."""
    return jnp.arange(tiling.blocks, dtype=jnp.int32) * tiling.block


def edges(static: Static, head: Head, start: Array) -> Iterator[tuple[slice, list[Tile]]]:
    """Yield rows of the block at `start`, and the tiles in which the band ends for them."""
    for row, same_rows in groupby(static.tiling.edges, lambda edge: edge.row):
        yield (
            slice(row, row + static.tiling.edge),
            [_at_edge(static.tiling, head, start, edge) for edge in same_rows],
        )


def _at_edge(tiling: Tiling, head: Head, start: Array, edge: EdgeTile) -> Tile:
    tile = Tile(start + edge.row, edge.rows, start + edge.col, edge.cols)
    rows, cols = tile.indices
    distance = (edge.col - edge.row) + jnp.arange(edge.cols)[None] - jnp.arange(edge.rows)[:, None]
    conditions = [] if tiling.low is None else [distance >= tiling.low]
    conditions += [] if tiling.high is None else [distance <= tiling.high]
    conditions += [(cols >= 0)[None]] if tiling.pad_before else []
    conditions += [(cols < tiling.s)[None]] if tiling.edges_cross_end else []
    conditions += [head.mask.block(rows, cols)[0, 0]] if head.mask.parts else []
    return tile._replace(visible=reduce(jnp.logical_and, conditions))


def over_chunks(
    static: Static, head: Head, start: Array, step: Callable[[Carry, Tile], Carry], carry: Carry
) -> Carry:
    """Return `carry` after `step(carry, tile)` for the chunks that a whole block of queries sees.

    First for the chunks in which all is visible, then for those where the mask or the end of the
    keys hides something.
    """
    tiling, chunk = static.tiling, static.tiling.chunk
    if tiling.edges_only:
        return carry
    if head.mask.summarised:
        return _over_seen_chunks(static, head, start, step, carry)
    kv_range = _chunk_range(tiling, head, start)
    first, stop, inner_first, inner_stop = (jnp.asarray(x, jnp.int32) for x in kv_range)
    if (
        tiling.chunks_fit
    ):  # there are no keys beyond the last whole chunk, so that chunks begin where these do
        first = first - first % chunk

    def chunk_at(index, masked):
        tile = Tile(start, tiling.block, first + index * chunk, chunk)
        if not masked:
            return tile
        rows, cols = tile.indices
        return tile._replace(visible=(cols < stop)[None] & head.mask.block(rows, cols)[0, 0])

    whole = jnp.int32(0)
    if not kv_range.needs_mask:
        whole = jnp.where(inner_first <= first, jnp.maximum(inner_stop - first, 0) // chunk, 0)
        carry = lax.fori_loop(
            jnp.int32(0), whole, lambda i, carry: step(carry, chunk_at(i, False)), carry
        )
    if head.mask.parts or not tiling.chunks_fit:
        count = -(-jnp.maximum(stop - first, 0) // chunk)
        carry = lax.fori_loop(whole, count, lambda i, carry: step(carry, chunk_at(i, True)), carry)
    return carry


def _over_seen_chunks(
    static: Static, head: Head, start: Array, step: Callable, carry: Carry
) -> Carry:
    # As `over_chunks`, where a summary knows which chunks are empty: they are left out wherever
    # they lie.
    tiling, chunk = static.tiling, static.tiling.chunk
    first, stop = (jnp.asarray(x, jnp.int32) for x in _chunk_range(tiling, head, start)[:2])
    first = first - first % chunk if tiling.chunks_fit else first
    cols = first + jnp.arange(-(-tiling.s // chunk) + 1, dtype=jnp.int32) * chunk
    last_row = jnp.minimum(start + tiling.block, tiling.t) - 1
    some, whole = head.mask.tiles(start, last_row, cols, cols + chunk, tiling.s)
    some = some & (cols < stop)
    whole = whole & some & (cols + chunk <= stop)
    order = jnp.argsort(jnp.where(whole, 0, jnp.where(some, 1, 2)), stable=True)

    def chunk_at(index, masked):
        col = cols[order[index]]
        tile = Tile(start, tiling.block, col, chunk)
        if not masked:
            return tile
        rows, keys = tile.indices
        return tile._replace(visible=(keys < stop)[None] & head.mask.block(rows, keys)[0, 0])

    bounds = [jnp.int32(0), *(jnp.count_nonzero(x).astype(jnp.int32) for x in (whole, some))]
    for masked, ends in zip((False, True), pairwise(bounds), strict=True):
        carry = lax.fori_loop(
            *ends, lambda i, carry, masked=masked: step(carry, chunk_at(i, masked)), carry
        )
    return carry


def _chunk_range(tiling: Tiling, head: Head, start: Array) -> KVRange:
    low, high = tiling.chunk_keys
    first, stop = 0 if low is None else start + low, tiling.s if high is None else start + high
    last_row = jnp.minimum(start + tiling.block, tiling.t) - 1
    return KVRange(first, stop, first, stop) & head.mask.kv_range(start, last_row, tiling.s)


def scores(static: Static, head: Head, query: Array, tile: Tile) -> tuple[Array, Array]:
    """Return the scores of a tile, -inf where hidden, and the scores after the soft cap.

    The second are those before a function of scores changed them.
    """
    x, visible = static.dot(query, keys(static, head.key, tile).T), tile.visible
    if head.bias is not None:
        bias = _bias_tile(static, head, head.bias, tile)
        if (
            static.soft_cap is not None or head.score is not None
        ):  # which would turn the -inf that hides into a number
            visible = (bias != -jnp.inf) & (True if visible is None else visible)
        x = x + (bias if head.score is None else jnp.where(bias == -jnp.inf, 0, bias))
    if static.soft_cap is not None:
        x = static.soft_cap * jnp.tanh(x / static.soft_cap)
    final = x if head.score is None else head.score.tile(x, *tile.indices)
    return (final if visible is None else jnp.where(visible, final, -jnp.inf)), x


def keys(static: Static, x: Array, tile: Tile) -> Array:
    """Return the keys or values of a tile."""
    return lax.dynamic_slice_in_dim(x, tile.col + static.tiling.pad_before, tile.cols)


def dropout_factors(static: Static, head: Head, tile: Tile) -> Array | None:
    """Return the factors of dropout: 0 or `1 / (1 - rate)`."""
    if head.dropout is None:
        return None
    rows, cols = tile.indices
    keep = keep_mask(
        head.dropout, head.b.reshape(1, 1), head.n.reshape(1, 1), rows[:, None], cols[None]
    )
    return jnp.where(keep, 1 / (1 - head.dropout.rate), 0).astype(static.sums)


def _bias_tile(static: Static, head: Head, bias: Array, tile: Tile) -> Array:
    whole, part = bias.shape, (1, 1, tile.rows, tile.cols)
    at = [
        0 if size == 1 else i
        for i, size in zip((head.b, head.n, *padded_start(static, tile)), whole, strict=True)
    ]
    return take(bias, at, [min(pair) for pair in zip(whole, part, strict=True)])[0, 0].astype(
        static.sums
    )


def padded_start(static: Static, tile: Tile) -> tuple[Array, Array]:
    """Return where a tile begins in arrays that are padded to the tiling."""
    return tile.row, tile.col + static.tiling.pad_before
