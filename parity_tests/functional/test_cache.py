"""The cache of keys and values by itself, on both sides.

What it holds, what queries see of it, and what it refuses.
"""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_attn.parity import tolerance
from parity_tests.asserts import assert_near
from parity_tests.caches import B, H, K, extend, new, zeros
from parity_tests.chunks import is_padding, places, store

T, N = 9, 4
RANDOM = np.random.default_rng(0)
QUERY, KEY, VALUE = (RANDOM.normal(size=(B, T, heads, H)) for heads in (N, K, K))
# Of calls: few, so that little is compiled.
WIDTHS = (1, 4)
# How many tokens fit, and the window of the layer.
KINDS = {
    "linear": (T, None),
    "ring buffer in place": (7, 3),
    "ring buffer": (4, 3),
    "no larger than the window": (3, 3),
}


def call(side):
    """Return one call of attention with a cache, compiled where there is a compiler."""

    def attend(cache, query, key, value, lengths):
        mask = side.Mask.causal() if cache.window is None else None
        held = cache.extend(key, value, mask, lengths)
        return side.dot_product_attention(query, held.key, held.value, mask=held.mask), held.cache

    return side.jit(attend)


@pytest.fixture(scope="module")
def attends(sides):
    return [(side, call(side)) for side in sides]


def in_calls(side, attend, cache, plan):
    """Return the output of the calls of a plan, at the places of the tokens.

    A call of the plan is a width, and a number of tokens for each row.
    """
    held, whole = np.zeros(B, int), np.zeros((B, T, N, H))
    for width, counts in plan:
        arrays = [side.array(x) for x in next_tokens(held, width, counts)]
        output, cache = attend(cache, *arrays, side.array(counts))
        held = store(whole, side.numpy(output), held, counts)
    return whole, held


def next_tokens(held, width, counts):
    """Return query, key and value of the next tokens, NaN where a row has fewer."""
    index = places(held, width, T)
    padding = is_padding(width, counts)[..., None, None]
    return [np.where(padding, np.nan, x[index]) for x in (QUERY, KEY, VALUE)]


def cut_to_fit(plan):
    """Return a plan of at most T tokens a row, with at most as many in a call as it is wide."""
    held = np.zeros(B, int)
    for width, counts in plan:
        counts = np.minimum(np.minimum(counts, width), T - held)
        held = held + counts
        yield width, counts


COUNTS = st.tuples(*[st.integers(0, max(WIDTHS))] * B)
CALLS = st.tuples(st.sampled_from(WIDTHS), COUNTS)
PLANS = st.lists(CALLS, max_size=8).map(lambda plan: list(cut_to_fit(plan)))


def full_forward(side, window, held):
    """Return the output of all tokens in one call, 0 for those that were not given."""
    mask = side.Mask.causal() if window is None else side.Mask.sliding_window(window)
    arrays = [side.array(x) for x in (QUERY, KEY, VALUE)]
    full = side.numpy(side.dot_product_attention(*arrays, mask=mask))
    is_given = np.arange(T) < held[:, None]
    return np.where(is_given[..., None, None], full, 0.0)


@pytest.mark.parametrize(("capacity", "window"), KINDS.values(), ids=KINDS)
@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(plan=PLANS)
def test_any_chunks_of_any_lengths_equal_the_full_forward(attends, capacity, window, plan):
    for side, attend in attends:
        whole, held = in_calls(side, attend, zeros(side, capacity, window), plan)
        truth = full_forward(side, window, held)
        # Nothing was given where a plan is empty, and all is 0.
        assert_near({side.name: whole}, {side.name: truth}, scale=1.0)


def test_positions_of_tokens_and_keys(side):
    cache = zeros(side, 6).append(new(side, 4), new(side, 4), side.array(np.array([4, 1])))
    assert cache.length.tolist() == [4, 1]
    assert cache.positions(3).tolist() == [[4, 5, 6], [1, 2, 3]]
    # With lengths, what is no token has position 0.
    assert cache.positions(3, side.array(np.array([2, 3]))).tolist() == [[4, 5, 0], [1, 2, 3]]
    assert cache.key_positions.tolist() == [[0, 1, 2, 3, -1, -1], [0, -1, -1, -1, -1, -1]]


def test_positions_of_the_keys_of_a_ring_buffer(side):
    cache = zeros(side, 4, window=3).append(new(side, 3), new(side, 3))
    # The first row takes three more, and overwrites its first two.
    cache = cache.append(new(side, 3), new(side, 3), side.array(np.array([3, 1])))
    assert cache.key_positions.tolist() == [[4, 5, 2, 3], [0, 1, 2, 3]]
    assert not side.numpy(cache.invalid).any()
    # More tokens than fit: the last ones stay, each at its place.
    cache = cache.append(new(side, 9), new(side, 9))
    assert cache.key_positions.tolist() == [[12, 13, 14, 11], [12, 9, 10, 11]]


def test_padding_is_not_stored(side):
    sevens = side.array(np.full((B, 4, K, H), 7.0))
    cache = zeros(side, 6).append(sevens, sevens, side.array(np.array([4, 1])))
    # Arrays are kept as heads by tokens: here the first head, and its first feature.
    stored = side.numpy(cache.key)[:, 0, :, 0]
    assert stored.tolist() == [[7, 7, 7, 7, 0, 0], [7, 0, 0, 0, 0, 0]]


def test_what_is_passed_in_stays_as_it_is(side):
    cache = zeros(side, 6)
    cache.append(new(side, 4), new(side, 4))
    assert (side.numpy(cache.key) == 0).all()
    assert cache.length.tolist() == [0, 0]


def test_one_sequence_without_a_batch_axis(side):
    query, key, value = (side.array(x[:, :4]) for x in (QUERY, KEY, VALUE))
    empty = zeros(side, 6)
    among = empty.extend(key, value, side.Mask.causal(), 3)
    one = side.KVCache.zeros(None, 6, K, H, dtype=empty.key.dtype)
    alone = one.extend(key[0], value[0], side.Mask.causal(), 3)
    assert_same_row(side, query, alone, among)


def assert_same_row(side, query, alone, among):
    assert (attended(side, query[0], alone) == attended(side, query, among)[0]).all()
    assert (side.numpy(alone.key) == side.numpy(among.key)[0]).all()
    positions = [0, 1, 2, -1, -1, -1]
    assert alone.key_positions.tolist() == among.key_positions[0].tolist() == positions
    assert alone.cache.length.tolist() == 3


def attended(side, query, held):
    """Return the output for queries over what a cache holds."""
    output = side.dot_product_attention(query, held.key, held.value, mask=held.mask)
    return side.numpy(output)


def test_a_narrow_cache_serves_a_wide_computation(side):
    query, key, value = (side.array(x, "float32") for x in (QUERY, KEY, VALUE))
    held = zeros(side, T, dtype="bfloat16").extend(key, value, side.Mask.causal())
    assert str(held.cache.key.dtype).endswith("bfloat16")
    assert held.key.dtype == key.dtype
    errors = tolerance.reordered({"": attended(side, query, held)}, {"": of_rounded(side, query)})
    assert max(errors.values()) <= 1


def test_what_a_narrow_cache_rounds_is_seen_in_the_output(side):
    query, key, value = (side.array(x, "float32") for x in (QUERY, KEY, VALUE))
    wide = side.dot_product_attention(query, key, value, mask=side.Mask.causal())
    assert (of_rounded(side, query) != side.numpy(wide)).any()


def of_rounded(side, query):
    """Return the output over keys and values that bfloat16 has rounded, computed in float32."""
    narrow = [side.numpy(side.array(x, "bfloat16")) for x in (KEY, VALUE)]
    rounded = [side.array(x.astype("float32")) for x in narrow]
    return side.numpy(side.dot_product_attention(query, *rounded, mask=side.Mask.causal()))


def test_a_row_may_be_filled_to_the_last_token(side):
    assert extend(side, 3).cache.length.tolist() == [8, 8]
    held = extend(side, 6, lengths=[3, 0])
    assert held.cache.length.tolist() == [8, 5]
    beside_a_full_one = extend(side, 6, held.cache, lengths=[0, 3])
    assert beside_a_full_one.cache.length.tolist() == [8, 8]


# Calls that do not fit, and the rows in which they do not.
INVALID = {
    "full": (lambda side: extend(side, 4), [True, True]),
    "one row full": (lambda side: extend(side, 6, lengths=[1, 4]), [False, True]),
    "the fuller row": (
        lambda side: extend(side, 6, extend(side, 3, lengths=[3, 0]).cache, lengths=[1, 3]),
        [True, False],
    ),
    "more than there are": (lambda side: extend(side, 2, lengths=[1, 3]), [False, True]),
    "less than none": (lambda side: extend(side, 2, lengths=[-1, 2]), [True, False]),
    "lengths in a ring buffer": (
        lambda side: extend(side, 2, zeros(side, 4, window=3), lengths=[3, 1]),
        [True, False],
    ),
}


@pytest.mark.parametrize(("act", "rows"), INVALID.values(), ids=INVALID)
def test_what_only_arrays_tell_makes_rows_invalid(side, act, rows):
    cache = act(side).cache
    assert cache.invalid.tolist() == rows
    # It stays so, also where nothing new comes.
    again = extend(side, 1, cache, lengths=[0, 0]).cache
    assert again.invalid.tolist() == rows
    for held in (cache, again):
        assert [bool(row.max() < 0) for row in side.numpy(held.key_positions)] == rows


def test_masks_that_are_the_same_for_all_tokens_need_no_size(side):
    held = extend(side, 2, mask=side.Mask.dense(np.array([[True]])))
    assert re.search("dense", repr(held.mask).lower())
    assert tuple(held.key.shape) == (B, 8, K, H)
