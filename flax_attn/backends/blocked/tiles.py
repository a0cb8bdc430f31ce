"""The tiles of one head, for both passes: where they are, what is visible in them, their scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from flax_attn.backends.blocked.slices import take
from flax_attn.backends.blocked.tiling import EdgeTile, Tiling
from flax_attn.backends.call import Call
from flax_attn.functional.dropout import keep_mask
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.kv_range import KVRange
from flax_attn.functional.masks import Mask
from flax_attn.functional.traced_score import TracedScore

Carry = TypeVar("Carry")


@dataclass(frozen=True)
class Head:
    """One head of one batch row, padded to the tiling; query scaled.

    Args:
        call: whole call that the head is of.
        tiling: division of queries and keys into tiles.
        query: query `(t, h)`, times the scale.
        key: key `(s, h)`.
        value: value `(s, v)`.
        bias: bias of rank 4 of all heads, or None.
        score: function of scores for this row and head, or None.
        sink: sink `(1,)`, or None.
        mask: mask for this row and head, without the band of the tiling.
        b: index of the batch row.
        n: index of the head.
    """

    call: Call
    tiling: Tiling
    query: Float[Array, "t h"]
    key: Float[Array, "s h"]
    value: Float[Array, "s v"]
    bias: Array | None
    score: TracedScore | None
    sink: Array | None
    mask: Mask
    b: Array
    n: Array

    @property
    def sums(self) -> jnp.dtype:
        """Dtype of products, of sums and of the softmax.

        Lower dtypes are slow on CPU, and float16 overflows where the backward pass divides by the
        sum of a long row.
        """
        return accumulation_dtype(self.call.query.dtype)

    @property
    def lowest(self) -> float:
        """The number below all scores; unlike -inf it can be subtracted from itself."""
        return float(jnp.finfo(self.sums).min)

    def dot(self, a: Array, b: Array) -> Array:
        """Return the matrix product of two matrices."""
        options = {"precision": self.call.precision, "preferred_element_type": self.sums}
        return jnp.matmul(a.astype(self.sums), b.astype(self.sums), **options)


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
        rows = self.row + jnp.arange(self.rows, dtype=jnp.int32)
        return rows, self.col + jnp.arange(self.cols, dtype=jnp.int32)


def starts(tiling: Tiling) -> Array:
    """Return the first query of every block."""
    return jnp.arange(tiling.blocks, dtype=jnp.int32) * tiling.block


def edges(head: Head, start: Array) -> Iterator[tuple[slice, list[Tile]]]:
    """Yield rows of the block at `start`, and the tiles in which the band ends for them."""
    for row, same_rows in groupby(head.tiling.edges, lambda edge: edge.row):
        tiles = [_at_edge(head, start, edge) for edge in same_rows]
        yield slice(row, row + head.tiling.edge), tiles


def _at_edge(head: Head, start: Array, edge: EdgeTile) -> Tile:
    tiling = head.tiling
    tile = Tile(start + edge.row, edge.rows, start + edge.col, edge.cols)
    rows, cols = tile.indices
    distance = (edge.col - edge.row) + jnp.arange(edge.cols)[None] - jnp.arange(edge.rows)[:, None]
    conditions = []
    if tiling.low is not None:
        conditions.append(distance >= tiling.low)
    if tiling.high is not None:
        conditions.append(distance <= tiling.high)
    if tiling.pad_before:
        conditions.append((cols >= 0)[None])
    if tiling.edges_cross_end:
        conditions.append((cols < tiling.s)[None])
    if head.mask.parts:
        conditions.append(head.mask.block(rows, cols)[0, 0])
    return tile._replace(visible=reduce(jnp.logical_and, conditions))


def over_chunks(
    head: Head, start: Array, step: Callable[[Carry, Tile], Carry], carry: Carry
) -> Carry:
    """Return `carry` after `step(carry, tile)` for the chunks that a whole block of queries sees.

    First for the chunks in which all is visible, then for those where the mask or the end of the
    keys hides something.
    """
    tiling, chunk = head.tiling, head.tiling.chunk
    if tiling.edges_only:
        return carry
    if head.mask.summarised:
        return _over_seen_chunks(head, start, step, carry)
    kv_range = _chunk_range(head, start)
    first, stop, inner_first, inner_stop = (jnp.asarray(x, jnp.int32) for x in kv_range)
    if tiling.chunks_fit:
        # There are no keys beyond the last whole chunk, so that chunks begin where these do.
        first = first - first % chunk

    def plain(index: Array, carry: Carry) -> Carry:
        return step(carry, Tile(start, tiling.block, first + index * chunk, chunk))

    def masked(index: Array, carry: Carry) -> Carry:
        return step(carry, _masked_chunk(head, start, first + index * chunk, stop))

    whole = jnp.int32(0)
    if not kv_range.needs_mask:
        seen_by_all = jnp.maximum(inner_stop - first, 0) // chunk
        whole = jnp.where(inner_first <= first, seen_by_all, 0)
        carry = lax.fori_loop(jnp.int32(0), whole, plain, carry)
    if head.mask.parts or not tiling.chunks_fit:
        count = -(-jnp.maximum(stop - first, 0) // chunk)
        carry = lax.fori_loop(whole, count, masked, carry)
    return carry


def _over_seen_chunks(head: Head, start: Array, step: Callable, carry: Carry) -> Carry:
    # As `over_chunks`, where a summary knows which chunks are empty: they are left out wherever
    # they lie.
    tiling, chunk = head.tiling, head.tiling.chunk
    kv_range = _chunk_range(head, start)
    first, stop = (jnp.asarray(x, jnp.int32) for x in kv_range[:2])
    if tiling.chunks_fit:
        first = first - first % chunk
    most = -(-tiling.s // chunk) + 1
    cols = first + jnp.arange(most, dtype=jnp.int32) * chunk
    last_row = jnp.minimum(start + tiling.block, tiling.t) - 1
    some, whole = head.mask.tiles(start, last_row, cols, cols + chunk, tiling.s)
    some = some & (cols < stop)
    whole = whole & some & (cols + chunk <= stop)
    # Chunks that are seen whole come first, then those of which some is seen.
    order = jnp.argsort(jnp.where(whole, 0, jnp.where(some, 1, 2)), stable=True)

    def plain(index: Array, carry: Carry) -> Carry:
        return step(carry, Tile(start, tiling.block, cols[order[index]], chunk))

    def masked(index: Array, carry: Carry) -> Carry:
        return step(carry, _masked_chunk(head, start, cols[order[index]], stop))

    first_masked, end = (jnp.count_nonzero(x).astype(jnp.int32) for x in (whole, some))
    carry = lax.fori_loop(jnp.int32(0), first_masked, plain, carry)
    return lax.fori_loop(first_masked, end, masked, carry)


def _masked_chunk(head: Head, start: Array, col: Array, stop: Array) -> Tile:
    tile = Tile(start, head.tiling.block, col, head.tiling.chunk)
    rows, cols = tile.indices
    visible = (cols < stop)[None] & head.mask.block(rows, cols)[0, 0]
    return tile._replace(visible=visible)


def _chunk_range(head: Head, start: Array) -> KVRange:
    tiling = head.tiling
    low, high = tiling.chunk_keys
    first = 0 if low is None else start + low
    stop = tiling.s if high is None else start + high
    last_row = jnp.minimum(start + tiling.block, tiling.t) - 1
    return KVRange(first, stop, first, stop) & head.mask.kv_range(start, last_row, tiling.s)


def scores(head: Head, query: Array, tile: Tile) -> tuple[Array, Array]:
    """Return the scores of a tile, -inf where hidden, and the scores after the soft cap.

    The second are those before a function of scores changed them.
    """
    soft_cap, visible = head.call.soft_cap, tile.visible
    x = head.dot(query, keys(head, head.key, tile).T)
    if head.bias is not None:
        bias = _bias_tile(head, head.bias, tile)
        if soft_cap is not None or head.score is not None:
            # Both would turn the -inf that hides into a number.
            unhidden = bias != -jnp.inf
            visible = unhidden if visible is None else unhidden & visible
        x = x + (bias if head.score is None else jnp.where(bias == -jnp.inf, 0, bias))
    if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
    final = x if head.score is None else head.score.tile(x, *tile.indices)
    return (final if visible is None else jnp.where(visible, final, -jnp.inf)), x


def keys(head: Head, x: Array, tile: Tile) -> Array:
    """Return the keys or values of a tile."""
    return lax.dynamic_slice_in_dim(x, tile.col + head.tiling.pad_before, tile.cols)


def dropout_factors(head: Head, tile: Tile) -> Array | None:
    """Return the factors of dropout: 0 or `1 / (1 - rate)`."""
    dropout = head.call.dropout
    if dropout is None:
        return None
    rows, cols = tile.indices
    b, n = head.b.reshape(1, 1), head.n.reshape(1, 1)
    keep = keep_mask(dropout, b, n, rows[:, None], cols[None])
    return jnp.where(keep, 1 / (1 - dropout.rate), 0).astype(head.sums)


def _bias_tile(head: Head, bias: Array, tile: Tile) -> Array:
    own = head.b, head.n, *padded_start(head, tile)
    # An axis of one serves every index.
    at = [0 if size == 1 else i for i, size in zip(own, bias.shape, strict=True)]
    shape = map(min, bias.shape, (1, 1, tile.rows, tile.cols))
    return take(bias, at, tuple(shape))[0, 0].astype(head.sums)


def padded_start(head: Head, tile: Tile) -> tuple[Array, Array]:
    """Return where a tile begins in arrays that are padded to the tiling."""
    return tile.row, tile.col + head.tiling.pad_before
