"""Bad sizes of a cache, and calls whose tokens, lengths or masks do not fit it."""

from dataclasses import replace

import numpy as np
import pytest
from flax import nnx

from parity_tests.asserts import assert_near
from parity_tests.caches import B, H, K, extend, filled, zeros

FITS = (
    r"capacity of 8 tokens; got {} new tokens, {} cached\. .*KVCache\.zeros\(b, 9, \.\.\.\), or a"
    r" ring buffer"
)
LENGTHS = r"lengths counts the real tokens of a call of t=2 tokens; got lengths={}\. Use 0 to 2"
WHOLE = (
    r"mask is that of the whole sequence, .*capacity=8 tokens it can hold; got {}\. Pad it to the"
    r" capacity"
)
BAD = {
    # Sizes.
    "window 0": (lambda side: zeros(side, 8, window=0), {"window": 0}),
    "wide window": (
        lambda side: zeros(side, 4, window=5),
        (
            r"a ring buffer must keep at least the window.*got window=5, capacity=4\. Use a"
            r" capacity of at least 5"
        ),
    ),
    "no capacity": (lambda side: zeros(side, 0), {"capacity": 0}),
    "no heads": (lambda side: side.KVCache.zeros(2, 4, 0, 3), {"num_kv_heads": 0}),
    "no width": (lambda side: side.KVCache.zeros(2, 4, 3, -1), {"head_dim": -1}),
    "rows below 0": (
        lambda side: side.KVCache.zeros(-1, 4, 3, 2),
        r"b must be a number of rows, .*None for one sequence.*; got b=-1\. Pass x\.shape\[0\]",
    ),
    "rows that are no integer": (
        lambda side: side.DeltaCache.zeros(2.0, 4, 3, 2),
        r"b must be a number of rows, .*; got b=2\.0\.",
    ),
    # More tokens than fit.
    "full": (lambda side: extend(side, 4, replace(filled(side), length=5)), FITS.format(4, 5)),
    "longer than all": (lambda side: extend(side, 9, zeros(side, 8)), FITS.format(9, 0)),
    "more than all": (lambda side: extend(side, 9, lengths=9), FITS.format(9, 0)),
    # Lengths that no call has.
    "lengths": (lambda side: extend(side, 2, lengths=3), LENGTHS.format(3)),
    "negative lengths": (lambda side: extend(side, 2, lengths=-1), LENGTHS.format(-1)),
    "lengths in a ring buffer": (
        lambda side: extend(side, 2, zeros(side, 4, window=3), lengths=3),
        LENGTHS.format(3),
    ),
    # Masks are those of the whole sequence.
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


def heads(side, **options):
    """Return a layer of 4 query and 2 key/value heads, 3 wide."""
    return side.build("MultiHeadAttention", 6, 12, 9, 0.0, 4, num_kv_heads=2, **options)


def delta(side, **options):
    return side.build("GatedDeltaNet", 6, 6, **{"num_heads": 4, "head_dim": 3} | options)


def attend(side, cache, layer=heads, b=2, **options):
    x = side.array(np.zeros((3, 6) if b is None else (b, 3, 6)))
    return layer(side, **options).attend(x, cache=cache)


def model(side, **options):
    sizes = {"num_layers": 2, "context_length": 9, "vocab_size": 11, "dropout": 0.0} | options
    return side.build("GPT2", side.GPT2Config(6, 2, **sizes))


def read(side, cache):
    return model(side).attend(side.array(np.ones((B, 3), int)), cache=cache)


def cross(side, kept, b=2):
    layer = side.build("CrossAttention", 6, 4, 0.0, 2)
    return layer(side.array(np.zeros((b, 3, 6))), kept(layer))


def answer(side, change, rows=B):
    """Decode with what was kept of an encoder, changed, and a cache of so many rows."""
    file = side.file("models.t5")
    config = file.T5Config(6, 8, 2, 3, 2, 2, vocab_size=11)
    t5 = file.T5(config, **({"rngs": nnx.Rngs(0)} if side.is_flax else {}))
    kept = t5.keep(t5.encode(side.array(np.ones((B, 4), int))))
    return t5.attend(side.array(np.ones((B, 3), int)), change(kept), cache=t5.init_cache(rows, 8))


MADE = (
    r"a cache is made for the heads and widths of one layer .*: {}; got {}\. Pass what init_cache"
)
RING = (
    r"a ring buffer keeps the keys of its own window; got one of window={} for a layer of"
    r" window={}, "
)
FLOATING = r"a cache stores keys .* must be floating point; got dtype {}\. Use that of the layer"
OURS = r"key \(2, 2, 8, 3\), value \(2, 2, 8, 3\)"
FOREIGN = {
    # Dtypes.
    "integers": (lambda side: zeros(side, 8, dtype="int32"), FLOATING.format("int32")),
    "booleans": (lambda side: zeros(side, 8, dtype="bool"), FLOATING.format("bool")),
    "an integer cache by hand": (
        lambda side: extend(
            side, 2, replace(filled(side), key=side.array(np.zeros((B, K, 8, H), int)))
        ),
        FLOATING.format("int64"),
    ),
    "an integer cache of a layer": (
        lambda side: attend(
            side, replace(filled(side), value=side.array(np.zeros((B, K, 8, H), int)))
        ),
        FLOATING.format("int64"),
    ),
    "integers by init_cache": (
        lambda side: heads(side).init_cache(2, 8, side.array([1]).dtype),
        FLOATING.format("int64"),
    ),
    "integers of a recurrent layer": (
        lambda side: delta(side).init_cache(2, 8, side.array([1]).dtype),
        FLOATING.format("int64"),
    ),
    # Arrays that do not fit the cache.
    "new tokens of other heads": (
        lambda side: zeros(side, 8).extend(*[side.array(np.ones((B, 2, 4, H)))] * 2),
        MADE.format(r"key \(2, 4, 8, 3\), value \(2, 4, 8, 3\)", OURS),
    ),
    "new tokens of another width": (
        lambda side: zeros(side, 8).append(*[side.array(np.ones((B, 2, K, 5)))] * 2),
        MADE.format(r"key \(2, 2, 8, 5\), value \(2, 2, 8, 5\)", OURS),
    ),
    "new tokens without a batch": (
        lambda side: zeros(side, 8).append(*[side.array(np.ones((2, K, H)))] * 2),
        MADE.format(r"key \(2, 8, 3\), value \(2, 8, 3\)", OURS),
    ),
    "fewer new values than keys": (
        lambda side: zeros(side, 8).extend(
            side.array(np.ones((B, 2, K, H))), side.array(np.ones((B, 1, K, H)))
        ),
        (
            r"^new keys and values are of the same rows, .*; got key \(2, 2, 2, 3\), value"
            r" \(2, 1, 2, 3\)\. Pass both for the same tokens$"
        ),
    ),
    "lengths of other rows": (
        lambda side: extend(side, 2, lengths=side.array([1, 2, 1])),
        r"^lengths must be one integer or one a row, shape \(2,\); got shape \(3,\)\. Pass how",
    ),
    # Caches that do not fit the layer.
    "other heads": (
        lambda side: attend(side, side.KVCache.zeros(B, 8, 4, H)),
        MADE.format(OURS, r"key \(2, 4, 8, 3\), value \(2, 4, 8, 3\)"),
    ),
    "another width": (
        lambda side: attend(side, side.KVCache.zeros(B, 8, K, 5)),
        MADE.format(OURS, r"key \(2, 2, 8, 5\), value \(2, 2, 8, 5\)"),
    ),
    "another width of values": (
        lambda side: attend(side, side.KVCache.zeros(B, 8, K, H, value_dim=4)),
        MADE.format(OURS, r"key \(2, 2, 8, 3\), value \(2, 2, 8, 4\)"),
    ),
    "another batch": (
        lambda side: attend(side, zeros(side, 8), b=3),
        MADE.format(r"key \(3, 2, 8, 3\), value \(3, 2, 8, 3\)", OURS),
    ),
    "a batch for one row": (
        lambda side: attend(side, zeros(side, 8), b=None),
        MADE.format(r"key \(2, 8, 3\), value \(2, 8, 3\)", OURS),
    ),
    # Ring buffers keep what a window needs, and no more.
    "a smaller window": (
        lambda side: attend(side, zeros(side, 8, window=3), window=5),
        RING.format(3, 5) + r"which attends to more\. Pass what init_cache of this layer",
    ),
    "a window for a layer without": (
        lambda side: attend(side, zeros(side, 8, window=3)),
        RING.format(3, None) + "which attends to all",
    ),
    "a ring buffer for a layer in both directions": (
        lambda side: attend(side, zeros(side, 8, window=3), causal=False),
        RING.format(3, None),
    ),
    # Caches of another kind.
    "a recurrent cache": (
        lambda side: attend(side, delta(side).init_cache(2, 8)),
        r"cache must be KVCache; got DeltaCache\. Pass what init_cache of this layer returns",
    ),
    "the caches of a model": (
        lambda side: attend(side, (zeros(side, 8),)),
        r"cache must be KVCache; got tuple\.",
    ),
    "keys for a recurrent layer": (
        lambda side: attend(side, zeros(side, 8), delta),
        r"cache must be DeltaCache; got KVCache\.",
    ),
    # Recurrent states that do not fit the layer.
    "other recurrent heads": (
        lambda side: attend(side, delta(side, num_heads=2).init_cache(2, 8), delta),
        r"state \(2, 4, 3, 3\); got query \(2, 3, 6\).* state \(2, 2, 3, 3\)\. Pass",
    ),
    "another kernel": (
        lambda side: attend(side, delta(side, kernel_size=3).init_cache(2, 8), delta),
        r"query \(2, 3, 12\).*; got query \(2, 2, 12\)",
    ),
    "another recurrent batch": (
        lambda side: attend(side, delta(side).init_cache(2, 8), delta, b=3),
        r"state \(3, 4, 3, 3\); got .*state \(2, 4, 3, 3\)",
    ),
    # Models have one cache a layer.
    "fewer layers": (
        lambda side: read(side, model(side, num_layers=1).init_cache(B, 8)),
        (
            r"cache is a tuple with one entry for each layer .*, 2 in all; got 1\. Pass what"
            r" init_cache of this model"
        ),
    ),
    "more layers": (
        lambda side: read(side, model(side, num_layers=3).init_cache(B, 8)),
        r"2 in all; got 3\.",
    ),
    "one cache for a model": (lambda side: read(side, zeros(side, 8)), r"2 in all; got KVCache\."),
    "a model's cache of other rows": (
        lambda side: read(side, model(side).init_cache(3, 8)),
        MADE.format(r"rows \(2,\)", r"rows \(3,\)"),
    ),
    "a model's cache without a batch": (
        lambda side: read(side, model(side).init_cache(None, 8)),
        MADE.format(r"rows \(2,\)", r"rows \(\)"),
    ),
    "a decoder's cache of other rows": (
        lambda side: answer(side, lambda kept: kept, rows=3),
        MADE.format(r"rows \(2,\)", r"rows \(3,\)"),
    ),
    # What cross-attention keeps of an encoder.
    "nothing kept": (
        lambda side: cross(side, lambda layer: None),
        r"kept must be KVCache; got NoneType\. Pass what keep of this layer returns",
    ),
    "kept of other rows": (
        lambda side: cross(side, lambda layer: layer.keep(side.array(np.zeros((2, 5, 4)))), b=3),
        MADE.format(
            r"key \(3, 2, 5, 3\), value \(3, 2, 5, 3\)", r"key \(2, 2, 5, 3\), value \(2, 2, 5, 3\)"
        ),
    ),
    "a ring buffer that was kept": (
        lambda side: cross(side, lambda layer: zeros(side, 8, window=3)),
        RING.format(3, None),
    ),
    "lengths of what is kept": (
        lambda side: cross(side, lambda layer: layer.keep(side.array(np.zeros((2, 5, 4))), [3, 6])),
        r"lengths counts the real tokens of a call of t=5 tokens; got lengths=6",
    ),
    "kept of fewer layers": (
        lambda side: answer(side, lambda kept: kept[:1]),
        (
            r"kept is a tuple with one entry for each layer .*, 2 in all; got 1\. Pass what keep of"
            r" this model"
        ),
    ),
}


@pytest.mark.parametrize(("act", "match"), FOREIGN.values(), ids=FOREIGN)
def test_a_cache_that_was_made_for_another_layer(assert_same_error, act, match):
    assert_same_error(act, match)


@pytest.mark.parametrize("window", [None, 5, 6])
def test_a_cache_that_keeps_more_is_the_same_function(side, window):
    """A whole cache, or a larger ring buffer, holds all keys that a window sees."""
    layer = heads(side, window=5)
    x = side.array(np.random.default_rng(0).normal(size=(B, 9, 6)))
    output = in_three_calls(side, layer, x, zeros(side, 9, window=window))
    assert_near({"output": output}, {"output": side.numpy(layer(x))})


def in_three_calls(side, layer, x, cache):
    outputs = []
    for start in range(0, 9, 3):
        attended = layer.attend(x[:, start : start + 3], cache=cache)
        cache = attended.cache
        outputs.append(side.numpy(attended.output))
    return np.concatenate(outputs, axis=1)


@pytest.mark.parametrize(("act", "match"), BAD.values(), ids=BAD)
def test_the_same_words(assert_same_error, act, match):
    assert_same_error(act, match)
