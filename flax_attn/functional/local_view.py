"""Masks and dropout of a part of a call: some of its rows, heads, queries and keys.

Only in flax_attn: torch_ref runs on one device.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from flax_attn.functional.dropout import KeyedDropout
from flax_attn.functional.kv_range import KVRange
from flax_attn.functional.mask_part import Part
from flax_attn.functional.masks import Mask
from flax_attn.functional.shapes import Index
from flax_attn.functional.token_runs import Places


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlacedDropout(KeyedDropout):
    """Dropout of a part: it drops what is dropped there of the whole.

    Args:
        places: places of the rows of the batch, heads, queries and keys of the part in the whole.
    """

    places: tuple[Places, Places, Places, Places]

    def indices(self, *parts: Index) -> tuple[Index, ...]:
        return tuple(places.of(index) for places, index in zip(self.places, parts, strict=True))


@dataclass(frozen=True)
class Placed(Part):
    """A mask of whole sequences at the queries and keys of a part of them.

    Args:
        mask: mask of the whole sequences.
        rows: places of the queries of the part.
        cols: places of the keys of the part.
        s: number of keys in the whole sequences.
    """

    mask: Mask
    rows: Places
    cols: Places
    s: int

    def allow(self, rows, cols):
        return self.mask.block(self.rows.of(rows.reshape(-1)), self.cols.of(cols.reshape(-1)))

    def kv_range(self, first, last, s):
        # The places keep the order of the tokens, so an interval of the whole is one of the part.
        found = self.mask.kv_range(self.rows.of(first), self.rows.of(last), self.s)
        start, stop = (self.cols.before(x) for x in found[:2])
        inner = (0, 0) if found.needs_mask else (self.cols.before(x) for x in found[2:])
        return KVRange(start, stop, *inner)

    @property
    def summarised(self):
        return self.mask.summarised

    def tiles(self, first, last, starts, stops, s):
        starts, stops = self.cols.of(starts), self.cols.of(stops - 1) + 1
        return self.mask.tiles(self.rows.of(first), self.rows.of(last), starts, stops, self.s)

    def row(self, b, n):
        return Placed(self.mask.row(b, n), self.rows, self.cols, self.s)


@dataclass(frozen=True)
class HeadsOf(Part):
    """Any part at some rows of the batch and some heads."""

    part: Part
    b: Places
    n: Places

    def allow(self, rows, cols):
        block = self.part.allow(rows, cols)
        return self.n.take(self.b.take(block.reshape((1,) * (4 - block.ndim) + block.shape), 0), 1)

    def kv_range(self, first, last, s):
        return self.part.kv_range(first, last, s)

    @property
    def summarised(self):
        return self.part.summarised

    def tiles(self, first, last, starts, stops, s):
        return self.part.tiles(first, last, starts, stops, s)

    def row(self, b, n):
        if n is None:
            return HeadsOf(self.part.row(self.b.of(b), None), self.b, self.n)
        return self.part.row(self.b.of(b), self.n.of(n))
