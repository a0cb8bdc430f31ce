"""The cut into tiles, and what the arrays of a mask show to some queries, exhaustively against the mask itself."""

from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import Mask
from flax_attn.backends.extent import extent
from flax_attn.backends.tiling import Strip, Tiling, cut

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
    times = np.zeros((tiling.blocks * tiling.block, tiling.before + tiling.s + tiling.after), int)
    for start in range(0, tiling.blocks * tiling.block, tiling.block):
        for strip in tiling.strips:
            edge(tiling, times, start, strip)
        if not tiling.narrow:
            loop(tiling, times, start)
    real = times[: tiling.t, tiling.before :]
    assert not times[: tiling.t, : tiling.before].any()
    assert not real[:, tiling.s :].any()
    return real[:, : tiling.s]


def edge(tiling, times, start, strip):
    rows, cols = start + strip.row + np.arange(strip.rows), start + strip.col + np.arange(strip.cols)
    distance = cols - rows[:, None]
    seen = np.ones_like(distance, bool)
    seen &= True if tiling.low is None else distance >= tiling.low
    seen &= True if tiling.high is None else distance <= tiling.high
    seen &= cols >= 0 if tiling.before else True
    seen &= cols < tiling.s if tiling.crosses_end else True
    inside(times, rows, cols + tiling.before)[...] += seen


def loop(tiling, times, start):
    first, stop = tiling.loop
    first = 0 if first is None else max(start + first, 0)
    stop = tiling.s if stop is None else min(start + stop, tiling.s)
    assert not tiling.even or (stop - first) % tiling.chunk == 0
    rows = start + np.arange(tiling.block)
    for col in range(first, stop, tiling.chunk):
        cols = col + np.arange(tiling.chunk)
        inside(times, rows, cols + tiling.before)[...] += cols < stop


def inside(times, rows, cols):
    # A slice beyond the array would be moved to where it fits, without a word.
    assert rows[0] >= 0
    assert cols[0] >= 0
    assert rows[-1] < times.shape[0]
    assert cols[-1] < times.shape[1]
    return times[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]


@pytest.mark.parametrize(("block", "strip"), [(8, 8), (16, 8), (32, 4), (12, 5)])
def test_every_score_that_is_seen_is_taken_once_and_no_other(block, strip):
    for t, s, low, high in product(SIZES, SIZES, ENDS, ENDS):
        found = covered(cut(t, s, low, high, block, strip))
        np.testing.assert_array_equal(found, band(low, high)[:t, :s], err_msg=f"{t=} {s=} {low=} {high=}")


def test_what_lies_beyond_a_narrow_band_is_in_no_tile():
    tiling = cut(1024, 1024, -31, 0, block=256, strip=64)
    assert tiling.narrow
    assert max(strip.cols for strip in tiling.strips) == 64 + 31
    assert len(tiling.strips) == 256 // 64


def test_a_causal_block_reads_no_keys_after_its_strips():
    tiling = cut(512, 512, None, 0, block=128, strip=32)
    assert tiling.strips == tuple(Strip(row, 32, 0, row + 32) for row in (0, 32, 64, 96))
    assert tiling.loop == (None, 0)
    assert (tiling.before, tiling.after, tiling.even) == (0, 0, True)


@pytest.mark.parametrize(("t", "block", "blocks"), [(1100, 1024, 2), (1024, 1024, 1), (2049, 1024, 3), (7, 1024, 1)])
def test_blocks_share_the_queries_evenly(t, block, blocks):
    tiling = cut(t, t, None, 0, block, 128)
    assert tiling.blocks == blocks
    assert tiling.block * blocks < t + 16 * blocks + 128 * blocks
    assert tiling.block % tiling.strip == 0


def test_a_band_that_hides_nothing_is_none():
    assert cut(9, 13, -8, 12, 8, 8) == cut(9, 13, None, None, 8, 8)
    assert cut(9, 13, -7, 11, 8, 8).low is not None
    assert cut(9, 13, -7, 11, 8, 8).high is not None


@pytest.mark.parametrize("size", [0, 1])
def test_nothing_to_cut(size):
    assert cut(size, 1, None, 0, 8, 8).blocks == size


T, S = 9, 11
KINDS = {
    "nothing": Mask(),
    "causal": Mask.causal(jnp.array([2])),
    "causal below": Mask.causal(-4),
    "window": Mask.window(3, 1, jnp.array([-2])),
    "window open to the left": Mask.window(None, 1, jnp.array([4])),
    "window open to the right": Mask.window(1, None, jnp.array([-5])),
    "prefix": Mask.prefix(jnp.array([4]), offset=-2),
    "lengths": Mask.lengths(query=jnp.array([6]), key=jnp.array([8])),
    "no keys": Mask.lengths(key=0),
    "far lengths": Mask.lengths(query=2**40, key=2**40),
    "segments": Mask.segments(np.array([0, 0, 1, 1, 1, 3, 3, 3, 3]), np.array([0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 9])),
    "unsorted segments": Mask.segments(
        np.array([5, 5, -1, 0, 5, 2, 2, 0, 7]), np.array([0, 5, 5, 0, 3, 2, 2, 5, 1, 1, 4])
    ),
    "extreme segments": Mask.segments(
        np.array([-(2**31), 0, 2**31 - 1] * 3, np.int32), np.array([2**31 - 1] * 6 + [-(2**31)] * 5, np.int32)
    ),
    "dense": Mask.dense(np.arange(T * S).reshape(T, S) % 5 > 2),
    "several": Mask.causal(jnp.array([2])) & Mask.lengths(key=jnp.array([7])) & Mask.window(4, None, jnp.array([2])),
}  # fmt: skip
TIGHT = ("nothing", "causal", "causal below", "window", "window open to the left", "window open to the right",
         "prefix", "lengths", "no keys", "far lengths", "several")  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_extents_hold_what_is_seen(name):
    seen = np.broadcast_to(KINDS[name].block(jnp.arange(T), jnp.arange(S))[0, 0], (T, S))
    spans = np.array([(first, last) for first in range(T) for last in range(first, T)], np.int32)
    found = jax.vmap(lambda span: jnp.stack(extent(KINDS[name], span[0], span[1], S)))(spans)
    for (first, last), (start, stop, openness) in zip(spans, np.asarray(found), strict=True):
        rows = seen[first : last + 1]
        cols = np.flatnonzero(rows.any(axis=0))
        assert all(start <= col < stop for col in cols)
        assert rows[:, max(start, 0) : max(0, min(openness, stop))].all()
        if name in TIGHT and len(cols):
            assert (max(start, 0), min(stop, S)) == (cols[0], cols[-1] + 1)


def test_sorted_segments_are_skipped():
    ids = jnp.arange(12, dtype=jnp.int32) // 4
    start, stop, _ = extent(Mask.segments(ids), jnp.int32(5), jnp.int32(6), 12)
    assert (start, stop) == (4, 8)
