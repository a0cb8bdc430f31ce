"""Bad sizes of a cache, and calls whose tokens, lengths or masks do not fit it."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

B, K, H = 2, 2, 3


def zeros(side, capacity, window=None, dtype="float64"):
    kind = getattr(jnp, dtype) if side.is_flax else side.array(np.zeros(1), dtype).dtype
    return side.KVCache.zeros(B, capacity, K, H, window=window, dtype=kind)


def new(side, t, dtype="float64"):
    return side.array(np.ones((B, t, K, H)), dtype)


def filled(side, count=5):
    return zeros(side, 8).append(new(side, count), new(side, count))


def extend(side, t, cache=None, mask=None, lengths=None):
    cache = filled(side) if cache is None else cache
    lengths = side.array(np.array(lengths)) if isinstance(lengths, list) else lengths
    return cache.extend(new(side, t), new(side, t), mask, lengths)


FITS = r"capacity of 8 tokens; got {} new tokens, {} cached\. .*KVCache\.zeros\(b, 9, \.\.\.\), or a ring buffer"
LENGTHS = r"lengths counts the real tokens of a call of t=2 tokens; got lengths={}\. Use 0 to 2"
WHOLE = r"mask is that of the whole sequence, .*capacity=8 tokens it can hold; got {}\. Pad it to the capacity"
BAD = {
    "window 0": (lambda side: zeros(side, 8, window=0), r"window must be a positive integer; got window=0"),
    "wide window": (
        lambda side: zeros(side, 4, window=5),
        r"a ring buffer must keep at least the window.*got window=5, capacity=4\. Use a capacity of at least 5",
    ),
    "no capacity": (lambda side: zeros(side, 0), r"capacity must be a positive integer; got capacity=0"),
    "no heads": (lambda side: side.KVCache.zeros(2, 4, 0, 3), r"num_kv_heads must be a positive integer"),
    "no width": (lambda side: side.KVCache.zeros(2, 4, 3, -1), r"head_dim must be a positive integer; got head_dim=-1"),
    "full": (lambda side: extend(side, 4, replace(filled(side), length=5)), FITS.format(4, 5)),
    "longer than all": (lambda side: extend(side, 9, zeros(side, 8)), FITS.format(9, 0)),
    "more than all": (lambda side: extend(side, 9, lengths=9), FITS.format(9, 0)),
    "lengths": (lambda side: extend(side, 2, lengths=3), LENGTHS.format(3)),
    "negative lengths": (lambda side: extend(side, 2, lengths=-1), LENGTHS.format(-1)),
    "lengths in a ring buffer": (lambda side: extend(side, 2, zeros(side, 4, window=3), lengths=3), LENGTHS.format(3)),
    "mask": (
        lambda side: extend(side, 2, mask=side.Mask.dense(np.ones((2, 5), bool))),
        WHOLE.format("mask of 2, 5 tokens"),
    ),
    "segments": (
        lambda side: extend(side, 2, mask=side.Mask.segments(np.zeros(7, int))),
        WHOLE.format("segments of 7 tokens"),
    ),
    "key segments": (
        lambda side: extend(side, 2, mask=side.Mask.segments(np.zeros(8, int), np.zeros(9, int))),
        WHOLE.format("key segments of 9 tokens"),
    ),
}


@pytest.mark.parametrize(("act", "match"), BAD.values(), ids=BAD)
def test_the_same_words(assert_same_error, act, match):
    assert_same_error(act, match)
