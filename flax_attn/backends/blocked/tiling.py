"""The division of `(t, s)` into tiles: edge tiles, and tiles to loop over.

The queries are taken in blocks, the keys in chunks. By the band of the mask (causal, window) a
chunk is visible to all queries of a block, to none, or crosses an edge of the band. Chunks visible
to all are looped over and need no mask. An edge has the same position relative to every block, so
it is divided at trace time into edge tiles: a few queries against just the keys that one of them
sees.
"""

from dataclasses import dataclass
from typing import NamedTuple


class EdgeTile(NamedTuple):
    """Queries `[row, row + rows)` and keys `[col, col + cols)`.

    Both are counted from the first query of a block.
    """

    row: int
    rows: int
    col: int
    cols: int


@dataclass(frozen=True)
class Tiling:
    """The tiles of one call; sizes in tokens.

    Query i sees key j only when `low <= j - i <= high`; None is unbounded.

    Args:
        t: number of queries.
        s: number of keys.
        block: number of queries taken at once.
        edge: number of queries that share an edge tile.
        chunk: number of keys taken at once.
        low: least `key - query` that is seen.
        high: greatest `key - query` that is seen.

    Example:
        >>> tiling = make_tiling(t=512, s=512, low=None, high=0, block=256, edge=128)
        >>> tiling.edges
        (EdgeTile(row=0, rows=128, col=0, cols=128), EdgeTile(row=128, rows=128, col=0, cols=256))
    """

    t: int
    s: int
    block: int
    edge: int
    chunk: int
    low: int | None
    high: int | None

    @property
    def blocks(self) -> int:
        """Number of blocks of queries; the last may reach beyond t."""
        return -(-self.t // self.block)

    @property
    def padded_t(self) -> int:
        """Number of queries of all blocks."""
        return self.blocks * self.block

    @property
    def edges_only(self) -> bool:
        """Whether there are only edge tiles: no key is visible to all queries of a block."""
        return self.low is not None and self.high is not None and self.high - self.low < self.block

    @property
    def edges(self) -> tuple[EdgeTile, ...]:
        """The edge tiles of the band, the same for every block; ordered by row."""
        return tuple(
            tile for row in range(0, self.block, self.edge) for tile in self._edges_of(row)
        )

    def _edges_of(self, row: int) -> list[EdgeTile]:
        low, high, edge = self.low, self.high, self.edge
        if low is not None and high is not None and self.edges_only:
            # The band may be empty.
            return [EdgeTile(row, edge, row + low, max(1, edge + high - low))]
        left = [] if low is None else [EdgeTile(row, edge, row + low, self.block - row)]
        return left if high is None else [*left, EdgeTile(row, edge, high, row + edge)]

    @property
    def tokens(self) -> int:
        """Number of queries and keys of a head, with what is padded at most."""
        return self.t + self.block + self.s + self.pad_before + self.pad_after

    @property
    def widest(self) -> int:
        """Number of keys of the widest tile."""
        chunk = 0 if self.edges_only else self.chunk
        return max([chunk, *(edge.cols for edge in self.edges)])

    @property
    def chunk_keys(self) -> tuple[int | None, int | None]:
        """The keys that the band shows to a whole block.

        They are counted from its first query; None is unbounded.
        """
        return None if self.low is None else self.block + self.low, self.high

    @property
    def chunks_fit(self) -> bool:
        """Whether the chunks fill the keys of every loop exactly."""
        start, stop = self.chunk_keys
        if start is not None or self.edges_only:
            return self.edges_only
        return self.s % self.chunk == 0 if stop is None else self._fit_until(stop)

    def _fit_until(self, stop: int) -> bool:
        # Whether they do where the chunks of a block end at a key, counted from its first query.
        last = (self.blocks - 1) * self.block + stop
        whole = self.block % self.chunk == stop % self.chunk == 0
        return whole and stop >= 0 and last <= self.s

    @property
    def pad_before(self) -> int:
        """Number of keys that edge tiles read before key 0."""
        return max(0, -min((tile.col for tile in self.edges), default=0))

    @property
    def edge_overhang(self) -> int:
        """Number of keys that edge tiles read after the last key."""
        reach = max((tile.col + tile.cols for tile in self.edges), default=0)
        return max(0, reach + (self.blocks - 1) * self.block - self.s)

    @property
    def pad_after(self) -> int:
        """Number of keys that edge tiles and chunks read after the last key."""
        return max(self.edge_overhang, 0 if self.chunks_fit else self.chunk)

    @property
    def edges_cross_end(self) -> bool:
        """Whether the band alone would show keys after the last one to one of the t queries."""
        return self.edge_overhang > 0 and (self.high is None or self.t - 1 + self.high >= self.s)


def make_tiling(t: int, s: int, low: int | None, high: int | None, block: int, edge: int) -> Tiling:
    """Return equal blocks of at most about `block` queries, edge tiles of at most about `edge`."""
    # A band that ends beyond the last query or key hides nothing there.
    low = None if low is not None and low <= 1 - t else low
    high = None if high is not None and high >= s - 1 else high
    edge = _share(_share(t, block), edge)
    size = -(-_share(t, block) // edge) * edge
    return Tiling(t, s, size, edge, size if high is not None else _share(s, block), low, high)


def _share(size: int, most: int) -> int:
    # Equal shares of at most about `most`, a multiple of 8 unless they are smaller than that.
    size = max(size, 1)
    share = -(-size // -(-size // most))
    return share if share <= 8 else -(-share // 8) * 8
