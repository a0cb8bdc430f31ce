"""How the blocked backend cuts `(t, s)` into tiles: which keys a block of queries meets in strips, which in a loop.

A block of queries is taken against chunks of keys. By the band of the mask (causal, window) a chunk is seen by all
queries of a block, by none, or lies on an edge of the band. Chunks seen by all are looped over and need no mask.
An edge lies in the same place relative to every block, so it is cut at trace time into strips: a few queries against
just the keys that one of them sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Strip(NamedTuple):
    """Queries `[row, row + rows)` against keys `[col, col + cols)`, all counted from the first query of a block."""

    row: int
    rows: int
    col: int
    cols: int


@dataclass(frozen=True)
class Tiling:
    """The cut of one call; sizes in tokens. Query i sees key j only when `low <= j - i <= high`; None is unbounded.

    Args:
        t: number of queries.
        s: number of keys.
        block: queries taken at once.
        strip: queries of a block that share one edge of the band.
        chunk: keys taken at once.
        low: the least `key - query` that is seen.
        high: the greatest `key - query` that is seen.

    Example:
        >>> tiling = cut(t=512, s=512, low=None, high=0, block=256, strip=128)
        >>> tiling.strips
        (Strip(row=0, rows=128, col=0, cols=128), Strip(row=128, rows=128, col=0, cols=256))
    """

    t: int
    s: int
    block: int
    strip: int
    chunk: int
    low: int | None
    high: int | None

    @property
    def blocks(self) -> int:
        """Number of blocks of queries; the last may reach beyond t."""
        return -(-self.t // self.block)

    @property
    def narrow(self) -> bool:
        """Whether no key is seen by all queries of a block, so that strips hold all there is."""
        return self.low is not None and self.high is not None and self.high - self.low < self.block

    @property
    def strips(self) -> tuple[Strip, ...]:
        """The edges of the band, for every block the same; ordered by row."""
        return tuple(strip for row in range(0, self.block, self.strip) for strip in self._strips_of(row))

    def _strips_of(self, row: int) -> list[Strip]:
        low, high = self.low, self.high
        if low is not None and high is not None and self.narrow:
            return [Strip(row, self.strip, row + low, max(1, self.strip + high - low))]  # the band may be empty
        left = [] if low is None else [Strip(row, self.strip, row + low, self.block - row)]
        return left if high is None else [*left, Strip(row, self.strip, high, row + self.strip)]

    @property
    def loop(self) -> tuple[int | None, int | None]:
        """The keys, counted from the first query of a block, that the band shows to the whole block; None is all."""
        return None if self.low is None else self.block + self.low, self.high

    @property
    def even(self) -> bool:
        """Whether the chunks fill the keys of every loop exactly."""
        start, stop = self.loop
        if start is not None or self.narrow:
            return self.narrow
        if stop is None:
            return self.s % self.chunk == 0
        last = (self.blocks - 1) * self.block + stop
        return stop >= 0 and last <= self.s and self.block % self.chunk == stop % self.chunk == 0

    @property
    def before(self) -> int:
        """Number of keys that strips reach below key 0."""
        return max(0, -min((strip.col for strip in self.strips), default=0))

    @property
    def beyond(self) -> int:
        """Number of keys that strips reach beyond the last key."""
        reach = max((strip.col + strip.cols for strip in self.strips), default=0)
        return max(0, reach + (self.blocks - 1) * self.block - self.s)

    @property
    def after(self) -> int:
        """Number of keys that strips and chunks reach beyond the last key."""
        return max(self.beyond, 0 if self.even else self.chunk)

    @property
    def crosses_end(self) -> bool:
        """Whether strips beyond the last key would be seen, by the band alone, by one of the t queries."""
        return self.beyond > 0 and (self.high is None or self.t - 1 + self.high >= self.s)


def cut(t: int, s: int, low: int | None, high: int | None, block: int, strip: int) -> Tiling:
    """Return the cut into equal blocks of at most about `block` queries and strips of at most about `strip`."""
    low = None if low is not None and low <= 1 - t else low  # the band ends beyond the last query or key
    high = None if high is not None and high >= s - 1 else high
    size = _share(t, block)
    strips = _share(size, strip)
    size = -(-size // strips) * strips
    chunk = size if high is not None else _share(s, block)
    return Tiling(t, s, size, strips, chunk, low, high)


def _share(size: int, most: int) -> int:
    # Equal shares of at most about `most`, a multiple of 8 unless they are smaller than that.
    size = max(size, 1)
    share = -(-size // -(-size // most))
    return share if share <= 8 else -(-share // 8) * 8
