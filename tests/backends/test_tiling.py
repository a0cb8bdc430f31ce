"""The division into tiles, exhaustively against the mask itself."""

from functools import cache
from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import Mask
from flax_attn.backends.blocked.tiling import EdgeTile, Tiling, make_tiling

MOST = 48
SIZES = (1, 8, 17, 33)
ENDS = (None, -40, -17, -9, -1, 0, 7, 20)


@cache
def band(low, high):
    """Return which query sees which key, by the mask."""
    mask = Mask() if low is None else Mask.window(0, None, low)
    mask = mask if high is None else mask & Mask.window(None, 0, high)
    assert mask.split_band() == ((low, high), Mask())
    index = jnp.arange(MOST)
    return np.broadcast_to(mask.block(index, index)[0, 0], (MOST, MOST))


def covered(tiling: Tiling):
    """Return how often each score is taken, by walking over the tiles as the backend does."""
    times = np.zeros(
        (tiling.blocks * tiling.block, tiling.pad_before + tiling.s + tiling.pad_after), int
    )
    for start in range(0, tiling.blocks * tiling.block, tiling.block):
        for tile in tiling.edges:
            edge(tiling, times, start, tile)
        if not tiling.edges_only:
            loop(tiling, times, start)
    real = times[: tiling.t, tiling.pad_before :]
    assert not times[: tiling.t, : tiling.pad_before].any()
    assert not real[:, tiling.s :].any()
    return real[:, : tiling.s]


def edge(tiling, times, start, tile):
    rows, cols = start + tile.row + np.arange(tile.rows), start + tile.col + np.arange(tile.cols)
    distance = cols - rows[:, None]
    seen = np.ones_like(distance, bool)
    seen &= True if tiling.low is None else distance >= tiling.low
    seen &= True if tiling.high is None else distance <= tiling.high
    seen &= cols >= 0 if tiling.pad_before else True
    seen &= cols < tiling.s if tiling.edges_cross_end else True
    inside(times, rows, cols + tiling.pad_before)[...] += seen


def loop(tiling, times, start):
    first, stop = tiling.chunk_keys
    first = 0 if first is None else max(start + first, 0)
    stop = tiling.s if stop is None else min(start + stop, tiling.s)
    assert not tiling.chunks_fit or (stop - first) % tiling.chunk == 0
    rows = start + np.arange(tiling.block)
    for col in range(first, stop, tiling.chunk):
        cols = col + np.arange(tiling.chunk)
        inside(times, rows, cols + tiling.pad_before)[...] += cols < stop


def inside(times, rows, cols):
    # A slice beyond the array would be moved to where it fits, without a word.
    assert rows[0] >= 0
    assert cols[0] >= 0
    assert rows[-1] < times.shape[0]
    assert cols[-1] < times.shape[1]
    return times[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]


@pytest.mark.parametrize(("block", "edge_rows"), [(8, 8), (16, 8), (32, 4), (12, 5)])
def test_every_score_that_is_seen_is_taken_once_and_no_other(block, edge_rows):
    for t, s, low, high in product(SIZES, SIZES, ENDS, ENDS):
        found = covered(make_tiling(t, s, low, high, block, edge_rows))
        np.testing.assert_array_equal(
            found, band(low, high)[:t, :s], err_msg=f"{t=} {s=} {low=} {high=}"
        )


def test_what_lies_beyond_a_narrow_band_is_in_no_tile():
    tiling = make_tiling(1024, 1024, -31, 0, block=256, edge=64)
    assert tiling.edges_only
    assert max(tile.cols for tile in tiling.edges) == 64 + 31
    assert len(tiling.edges) == 256 // 64


def test_a_causal_block_reads_no_keys_after_its_edge_tiles():
    tiling = make_tiling(512, 512, None, 0, block=128, edge=32)
    assert tiling.edges == tuple(EdgeTile(row, 32, 0, row + 32) for row in (0, 32, 64, 96))
    assert tiling.chunk_keys == (None, 0)
    assert (tiling.pad_before, tiling.pad_after, tiling.chunks_fit) == (0, 0, True)


@pytest.mark.parametrize(
    ("t", "block", "blocks"), [(1100, 1024, 2), (1024, 1024, 1), (2049, 1024, 3), (7, 1024, 1)]
)
def test_blocks_share_the_queries_evenly(t, block, blocks):
    tiling = make_tiling(t, t, None, 0, block, 128)
    assert tiling.blocks == blocks
    assert tiling.block * blocks < t + 16 * blocks + 128 * blocks
    assert tiling.block % tiling.edge == 0


def test_a_band_that_hides_nothing_is_none():
    assert make_tiling(9, 13, -8, 12, 8, 8) == make_tiling(9, 13, None, None, 8, 8)
    assert make_tiling(9, 13, -7, 11, 8, 8).low is not None
    assert make_tiling(9, 13, -7, 11, 8, 8).high is not None


@pytest.mark.parametrize("size", [0, 1])
def test_nothing_to_make_tiling(size):
    assert make_tiling(size, 1, None, 0, 8, 8).blocks == size
