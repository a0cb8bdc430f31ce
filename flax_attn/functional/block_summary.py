"""Masks with a summary of their tiles: which are empty, whole, or need the mask.

Only in flax_attn: kernels ask for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange, reduce
from jaxtyping import Array

from attn_spec.checks import check_positive
from flax_attn.functional.kv_range import KVRange, Tiles, between, true_range
from flax_attn.functional.mask_part import MaskPart, pick


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Summary:
    """What the tiles of a mask show, each of `size` queries by `size` keys.

    Args:
        some: whether a tile shows anything, `(#b, #n, t / size, s / size)`.
        whole: whether a tile hides nothing, of the same shape.
        size: size of a tile, in tokens.
        shape: sizes `(t, s)` of the mask.
    """

    some: Any
    whole: Any
    size: int = field(metadata={"static": True})
    shape: tuple[int, int] = field(metadata={"static": True})

    def __str__(self) -> str:
        return "summarise({}, {}, tile={})".format(*self.shape, self.size)

    def check_shape(self, t: int, s: int) -> None:
        """Raise unless the summary was made for `t` queries and `s` keys."""
        if self.shape == (t, s):
            return
        made = "t={}, s={}".format(*self.shape)
        raise ValueError(
            "the summary of a mask is one of its tiles, for one number of queries and keys;"
            f" got t={t}, s={s}, and a summary for {made}. Make it for this call:"
            f" mask.summarise({t}, {s})"
        )

    def row(self, b: Any, n: Any) -> Summary:
        """Return the summary for one row of the batch and one head; None is all heads."""
        some, whole = pick(self.some, b, 0), pick(self.whole, b, 0)
        return replace(self, some=pick(some, n, 1), whole=pick(whole, n, 1))

    def columns(self, first: Any, last: Any) -> Tiles:
        """Return what the queries `first` to `last` see of every run of `size` keys.

        This is over all rows of the batch and all heads.
        """
        # Of rows of tiles, those that hold one of the queries.
        count = self.some.shape[2]
        asking = between(count, first // self.size, last // self.size)[:, None]
        # Tiles of other queries show nothing and hide nothing.
        some = reduce(self.some, "b n t s -> t s", "max") & asking
        whole = reduce(self.whole, "b n t s -> t s", "min") | ~asking
        return Tiles(some.any(axis=0), whole.all(axis=0))


@dataclass(frozen=True)
class Summarised(MaskPart):
    """A mask and the summary of its tiles.

    Args:
        mask: a `Mask`.
        summary: summary of its tiles; None where the queries are not those that it was made for.
    """

    mask: Any
    summary: Summary | None = None

    @property
    def expression(self) -> str:
        """The expression that makes it."""
        mask = repr(self.mask) if len(self.mask.parts) == 1 else f"({self.mask!r})"
        return mask if self.summary is None else f"{mask}.{self.summary}"

    def resolve(self, b, n, t, s):
        if self.summary is not None:
            self.summary.check_shape(t, s)
        return replace(self, mask=self.mask.resolve(b, n, t, s))

    def sized(self, b, n):
        return replace(self, mask=self.mask.sized(b, n))

    def allow(self, rows, cols):
        return self.mask.block(rows.reshape(-1), cols.reshape(-1))

    def kv_range(self, first, last, s):
        found = self.mask.kv_range(first, last, s)
        if self.summary is None:
            return found
        seen = self.summary.columns(first, last).some
        start, stop = true_range(seen, len(seen) * self.summary.size)
        return found & KVRange(start, stop, 0, s)

    @property
    def summarised(self):
        return self.summary is not None

    def tiles(self, first, last, starts, stops, s):
        if self.summary is None:
            return self.mask.tiles(first, last, starts, stops, s)
        columns = self.summary.columns(first, last)
        return columns.over(starts, stops, self.summary.size)

    def row(self, b, n):
        summary = None if self.summary is None else self.summary.row(b, n)
        return Summarised(self.mask.row(b, n), summary)

    def shift(self, start, t, s):
        return Summarised(self.mask.shift(start, t, s))

    def check_whole(self, s):
        self.mask.check_whole(s)


def summarise(mask: Any, b: int, n: int, t: int, s: int, size: int) -> Summarised:
    """Return a mask with the summary of its tiles of `size` queries and keys."""
    check_positive(tile=size)
    mask = mask.resolve(b, n, t, s)
    some, whole = _tiles(mask, t, s, size)
    return Summarised(mask, Summary(some, whole, size, (t, s)))


@partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _tiles(mask: Any, t: int, s: int, size: int) -> tuple[Array, Array]:
    cols = _tokens(s, size).reshape(-1)
    # Rows of tiles one after the other, so that no more than `size` queries are in memory at once.
    one_row = partial(_row_of_tiles, mask, cols)
    some, whole = jax.lax.map(one_row, _tokens(t, size))
    some = rearrange(some, "t b n s -> b n t s")
    return some, rearrange(whole, "t b n s -> b n t s")


def _row_of_tiles(mask: Any, cols: Array, rows: Array) -> tuple[Array, Array]:
    """Return which tiles `(b, n, s)` of as many queries as keys show anything, and which all."""
    seen = mask.block(rows, cols)
    b, n, _, _ = seen.shape
    seen = jnp.broadcast_to(seen, (b, n, len(rows), len(cols)))
    tiles = rearrange(seen, "b n t (tiles s) -> b n tiles (t s)", s=len(rows))
    return tiles.any(axis=-1), tiles.all(axis=-1)


def _tokens(tokens: int, size: int) -> Array:
    tiles = -(-tokens // size)
    index = jnp.arange(tiles * size, dtype=jnp.int32)
    # The last token stands for those that the last tile has too many, and changes nothing.
    return jnp.minimum(index, tokens - 1).reshape(tiles, size)
