"""The tiles of one head: where they lie, what is seen in them, and their scores. Both passes walk over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from flax_attn.backends.extent import extent
from flax_attn.backends.slices import take
from flax_attn.backends.tiling import Strip, Tiling
from flax_attn.functional.dropout import KeyedDropout, keep_mask
from flax_attn.functional.mask_parts import Dense, Segments, Window
from flax_attn.functional.masks import Mask


@dataclass(frozen=True)
class Static:
    """What is known before tracing: the cut, and how to compute.

    Args:
        tiling: how queries and keys are cut.
        soft_cap: of the scores, or None.
        precision: of the matrix products.
        operand: the dtype that matrix products read.
        sums: the dtype of sums and of the softmax.
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
        query `(t, h)`, key `(s, h)`, value `(s, v)`; bias of rank 4 for all heads, or None; sink a scalar or None; mask
        what is hidden beside the band, as one of one row and one head; b and n the indices of this head.
    """

    query: Float[Array, "t h"]
    key: Float[Array, "s h"]
    value: Float[Array, "s v"]
    bias: Array | None
    sink: Array | None
    mask: Mask
    dropout: KeyedDropout | None
    b: Array
    n: Array


class Tile(NamedTuple):
    """Queries from `row` against keys from `col`; `visible` is what is seen of it, None is all."""

    row: Array
    rows: int
    col: Array
    cols: int
    visible: Bool[Array, "#t #s"] | None = None

    @property
    def indices(self) -> tuple[Array, Array]:
        """The indices of the queries and of the keys."""
        return self.row + jnp.arange(self.rows, dtype=jnp.int32), self.col + jnp.arange(self.cols, dtype=jnp.int32)


def starts(tiling: Tiling) -> Array:
    """Return the first query of every block."""
    return jnp.arange(tiling.blocks, dtype=jnp.int32) * tiling.block


def edges(static: Static, head: Head, start: Array) -> Iterator[tuple[slice, list[Tile]]]:
    """Yield rows of the block at `start`, and the tiles in which the band ends for them."""
    for row, strips in groupby(static.tiling.strips, lambda strip: strip.row):
        yield slice(row, row + static.tiling.strip), [_edge(static.tiling, head, start, strip) for strip in strips]


def _edge(tiling: Tiling, head: Head, start: Array, strip: Strip) -> Tile:
    tile = Tile(start + strip.row, strip.rows, start + strip.col, strip.cols)
    rows, cols = tile.indices
    distance = (strip.col - strip.row) + jnp.arange(strip.cols)[None] - jnp.arange(strip.rows)[:, None]
    seen = [] if tiling.low is None else [distance >= tiling.low]
    seen += [] if tiling.high is None else [distance <= tiling.high]
    seen += [(cols >= 0)[None]] if tiling.before else []
    seen += [(cols < tiling.s)[None]] if tiling.crosses_end else []
    seen += [head.mask.block(rows, cols)[0, 0]] if head.mask.parts else []
    return tile._replace(visible=reduce(jnp.logical_and, seen))


def over_chunks(static: Static, head: Head, start: Array, step: Callable[[Any, Tile], Any], carry: Any) -> Any:
    """Return `carry` taken by `step` over the keys that the band shows to the whole block at `start`.

    First over the chunks in which all is seen, then over those where the mask or the end of the keys hides something.
    """
    tiling, chunk = static.tiling, static.tiling.chunk
    if tiling.narrow:
        return carry
    first, stop, open_stop = _loop_bounds(tiling, head, start)

    def chunk_at(index, checked):
        tile = Tile(start, tiling.block, first + index * chunk, chunk)
        if not checked:
            return tile
        rows, cols = tile.indices
        return tile._replace(visible=(cols < stop)[None] & head.mask.block(rows, cols)[0, 0])

    whole = jnp.maximum(open_stop - first, 0) // chunk
    if not any(isinstance(part, Dense | Segments | Window) for part in head.mask.parts):  # these have no whole chunks
        carry = lax.fori_loop(jnp.int32(0), whole, lambda i, carry: step(carry, chunk_at(i, False)), carry)
    if head.mask.parts or not tiling.even:
        count = -(-jnp.maximum(stop - first, 0) // chunk)
        carry = lax.fori_loop(whole, count, lambda i, carry: step(carry, chunk_at(i, True)), carry)
    return carry


def _loop_bounds(tiling: Tiling, head: Head, start: Array) -> tuple[Array, Array, Array]:
    low, high = tiling.loop
    first = jnp.int32(0) if low is None else jnp.maximum(start + low, 0)
    stop = jnp.int32(tiling.s) if high is None else jnp.minimum(start + high, tiling.s)
    seen = extent(head.mask, start, jnp.minimum(start + tiling.block, tiling.t) - 1, tiling.s)
    stop = jnp.minimum(stop, seen.stop)
    return jnp.maximum(first, seen.start), stop, jnp.minimum(stop, seen.open)


def scores(static: Static, head: Head, query: Array, tile: Tile) -> tuple[Array, Array]:
    """Return the scores of a tile, -inf where hidden, and the same before anything is hidden."""
    found, visible = static.dot(query, keys(static, head.key, tile).T), tile.visible
    if head.bias is not None:
        bias = _bias_tile(static, head, head.bias, tile)
        found = found + bias
        if static.soft_cap is not None:  # which would turn the -inf that hides into a number
            visible = (bias != -jnp.inf) & (True if visible is None else visible)
    if static.soft_cap is not None:
        found = static.soft_cap * jnp.tanh(found / static.soft_cap)
    return (found if visible is None else jnp.where(visible, found, -jnp.inf)), found


def keys(static: Static, x: Array, tile: Tile) -> Array:
    """Return the keys or values of a tile."""
    return lax.dynamic_slice_in_dim(x, tile.col + static.tiling.before, tile.cols)


def kept(static: Static, head: Head, tile: Tile) -> Array | None:
    """Return the factors of dropout: 0 or `1 / (1 - rate)`."""
    if head.dropout is None:
        return None
    rows, cols = tile.indices
    keep = keep_mask(head.dropout, head.b.reshape(1, 1), head.n.reshape(1, 1), rows[:, None], cols[None])
    return jnp.where(keep, 1 / (1 - head.dropout.rate), 0).astype(static.sums)


def _bias_tile(static: Static, head: Head, bias: Array, tile: Tile) -> Array:
    whole, part = bias.shape, (1, 1, tile.rows, tile.cols)
    at = [0 if size == 1 else i for i, size in zip((head.b, head.n, *place(static, tile)), whole, strict=True)]
    return take(bias, at, [min(pair) for pair in zip(whole, part, strict=True)])[0, 0].astype(static.sums)


def place(static: Static, tile: Tile) -> tuple[Array, Array]:
    """Return where a tile begins in arrays that are padded to the tiling."""
    return tile.row, tile.col + static.tiling.before
