"""The tiles of one head, for both passes: where they are, what is visible in them, their scores."""

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
from flax_attn.backends.tile import TileScores
from flax_attn.backends.tile import scores as tile_scores
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
    tile = Tile(start + edge.row, edge.rows, start + edge.col, edge.cols)
    conditions = [*_in_band(head.tiling, edge), *_inside(head, tile)]
    return tile._replace(visible=reduce(jnp.logical_and, conditions))


def _in_band(tiling: Tiling, edge: EdgeTile) -> Iterator[Array]:
    distance = (edge.col - edge.row) + jnp.arange(edge.cols)[None] - jnp.arange(edge.rows)[:, None]
    if tiling.low is not None:
        yield distance >= tiling.low
    if tiling.high is not None:
        yield distance <= tiling.high


def _inside(head: Head, tile: Tile) -> Iterator[Array]:
    # What else an edge tile hides: keys that are none, and what the rest of the mask does.
    _, cols = tile.indices
    if head.tiling.pad_before:
        yield (cols >= 0)[None]
    if head.tiling.edges_cross_end:
        yield (cols < head.tiling.s)[None]
    if head.mask.parts:
        yield head.mask.block(*tile.indices)[0, 0]


def over_chunks(
    head: Head, start: Array, step: Callable[[Carry, Tile], Carry], carry: Carry
) -> Carry:
    """Return `carry` after `step(carry, tile)` for the chunks that a whole block of queries sees.

    First for the chunks in which all is visible, then for those where the mask or the end of the
    keys hides something.
    """
    if head.tiling.edges_only:
        return carry
    chunks = _seen_chunks(head, start) if head.mask.summarised else _chunks(head, start)

    def plain(index: Array, carry: Carry) -> Carry:
        tile = Tile(start, head.tiling.block, chunks.first_key(index), head.tiling.chunk)
        return step(carry, tile)

    def masked(index: Array, carry: Carry) -> Carry:
        return step(carry, _masked_chunk(head, start, chunks.first_key(index), chunks.stop))

    if chunks.some_whole:
        carry = lax.fori_loop(jnp.int32(0), chunks.whole, plain, carry)
    if chunks.some_masked:
        carry = lax.fori_loop(chunks.whole, chunks.count, masked, carry)
    return carry


class _Chunks(NamedTuple):
    # The chunks that a block of queries sees, those that it sees whole first.
    first_key: Callable[[Array], Array]
    stop: Array
    whole: Array
    count: Array
    some_whole: bool = True
    some_masked: bool = True


def _chunks(head: Head, start: Array) -> _Chunks:
    # Those between the first and the last key.
    tiling = head.tiling
    kv_range = _chunk_range(head, start)
    first, stop = _chunk_ends(tiling, kv_range)
    return _Chunks(
        first_key=lambda index: first + index * tiling.chunk,
        stop=stop,
        whole=_whole_chunks(tiling, kv_range, first),
        count=-(-jnp.maximum(stop - first, 0) // tiling.chunk),
        some_whole=not kv_range.needs_mask,
        some_masked=bool(head.mask.parts) or not tiling.chunks_fit,
    )


def _whole_chunks(tiling: Tiling, kv_range: KVRange, first: Array) -> Array:
    # How many chunks from the first on are seen whole.
    if kv_range.needs_mask:
        return jnp.int32(0)
    inner_first, inner_stop = (jnp.asarray(x, jnp.int32) for x in kv_range[2:4])
    seen_by_all = jnp.maximum(inner_stop - first, 0) // tiling.chunk
    return jnp.where(inner_first <= first, seen_by_all, 0)


def _seen_chunks(head: Head, start: Array) -> _Chunks:
    # A summary knows which chunks are empty: they are left out wherever they lie.
    first, stop = _chunk_ends(head.tiling, _chunk_range(head, start))
    most = -(-head.tiling.s // head.tiling.chunk) + 1
    cols = first + jnp.arange(most, dtype=jnp.int32) * head.tiling.chunk
    some, whole = _summarised(head, start, cols, stop)
    order = jnp.argsort(jnp.where(whole, 0, jnp.where(some, 1, 2)), stable=True)
    return _Chunks(lambda index: cols[order[index]], stop, _count(whole), _count(some))


def _count(chunks: Array) -> Array:
    return jnp.count_nonzero(chunks).astype(jnp.int32)


def _summarised(head: Head, start: Array, cols: Array, stop: Array) -> tuple[Array, Array]:
    # Which chunks are seen in part, and which whole.
    ends = cols + head.tiling.chunk
    some, whole = head.mask.tiles(start, _last_row(head, start), cols, ends, head.tiling.s)
    some = some & (cols < stop)
    return some, whole & some & (ends <= stop)


def _chunk_ends(tiling: Tiling, kv_range: KVRange) -> tuple[Array, Array]:
    first, stop = (jnp.asarray(x, jnp.int32) for x in kv_range[:2])
    # There are no keys beyond the last whole chunk, so that chunks begin where these do.
    return (first - first % tiling.chunk if tiling.chunks_fit else first), stop


def _last_row(head: Head, start: Array) -> Array:
    return jnp.minimum(start + head.tiling.block, head.tiling.t) - 1


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
    seen = head.mask.kv_range(start, _last_row(head, start), tiling.s)
    return KVRange(first, stop, first, stop) & seen


def scores(head: Head, query: Array, tile: Tile) -> TileScores:
    """Return the scores of a tile."""
    score, bias = head.score, head.bias
    products = head.dot(query, keys(head, head.key, tile).T)
    return tile_scores(
        products,
        bias=None if bias is None else _bias_tile(head, bias, tile),
        visible=tile.visible,
        soft_cap=head.call.soft_cap,
        function=None if score is None else lambda x: score.tile(x, *tile.indices),
    )


def keys(head: Head, x: Array, tile: Tile) -> Array:
    """Return the keys or values of a tile."""
    return lax.dynamic_slice_in_dim(x, tile.col + head.tiling.pad_before, tile.cols)


def dropout_factors(head: Head, tile: Tile) -> Array | None:
    """Return the factors of dropout: 0 or `1 / (1 - rate)`."""
    dropout = head.call.dropout
    if dropout is None:
        return None
    rows, cols = tile.indices
    keep = keep_mask(dropout, head.b.reshape(1, 1), head.n.reshape(1, 1), rows[:, None], cols[None])
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
