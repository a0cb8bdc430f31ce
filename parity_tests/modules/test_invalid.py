"""Invalid values give NaN, in the same places on both sides.

They are not read, so no call waits for the device.
"""

import numpy as np
import pytest

from flax_attn import convert
from parity_tests.asserts import assert_near

B, T, D, CAPACITY = 3, 4, 6, 7
X = np.random.default_rng(0).normal(size=(B, T, D))
IDS = np.random.default_rng(1).integers(0, 11, (B, T))
# A mask for each row and head, of as many tokens as the cache holds.
DENSE = np.random.default_rng(2).random((B, 4, CAPACITY, CAPACITY)) < 0.7


@pytest.fixture
def attentions(sides):
    return same_weights(
        sides, [side.build("MultiHeadAttention", D, 8, 9, 0.0, 4) for side in sides]
    )


@pytest.fixture
def models(sides):
    return same_weights(
        sides, [side.build("GPT2", side.GPT2Config(6, 2, 1, 9, vocab_size=11)) for side in sides]
    )


def same_weights(sides, modules):
    ours, theirs = modules
    ours.eval()
    theirs.eval()
    weights = {name: sides[1].array(array) for name, array in convert.state_dict(ours).items()}
    theirs.load_state_dict(weights)
    return list(zip(sides, modules, strict=True))


def same(modules, call):
    """Return what a call gives, which is the same on both sides, NaN for NaN."""
    ours, theirs = (side.numpy(call(side, module)) for side, module in modules)
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    assert_near({"": np.nan_to_num(ours)}, {"": np.nan_to_num(theirs)})
    return ours


def rows(output):
    """Return which rows of the batch are NaN throughout; the others hold none."""
    nan = np.isnan(output).reshape(len(output), -1)
    assert (nan.all(axis=1) == nan.any(axis=1)).all()
    return nan.all(axis=1).tolist()


# The lengths of two calls, and the rows that they make invalid.
BAD_LENGTHS = {
    "too many for the cache": ([4, 3, 4], [4, 4, 3], [True, False, False]),
    "more than there are": ([1, 1, 1], [2, 5, 1], [False, True, False]),
    "negative": ([1, 1, 1], [2, 3, -1], [False, False, True]),
    "both, and then nothing": ([5, -1, 0], [0, 0, 0], [True, True, False]),
}


@pytest.mark.parametrize("mask", [None, DENSE], ids=["open", "dense"])
@pytest.mark.parametrize(("first", "second", "invalid"), BAD_LENGTHS.values(), ids=BAD_LENGTHS)
def test_rows_that_do_not_fit_a_cache_are_nan(attentions, mask, first, second, invalid):
    def call(side, module):
        options = {} if mask is None else {"mask": side.array(mask)}
        cache = module.init_cache(B, CAPACITY)
        return second_output(side, module, X, cache, (first, second), **options)

    assert rows(same(attentions, call)) == invalid


def second_output(side, module, tokens, cache, both_lengths, **options):
    """Return the output of the second of two calls with a cache."""
    for lengths in both_lengths:
        given = side.array(np.array(lengths))
        attended = module.attend(side.array(tokens), lengths=given, cache=cache, **options)
        cache = attended.cache
    return attended.output


def test_lengths_beyond_the_tokens_are_all_and_below_zero_none(attentions):
    def call(lengths):
        return same(
            attentions,
            lambda side, module: module(side.array(X), lengths=side.array(np.array(lengths))),
        )

    np.testing.assert_array_equal(call([9, -2, 3]), call([T, 0, 3]))


@pytest.mark.parametrize("bad", [11, -1])
def test_an_id_outside_the_vocabulary_is_nan_from_there_on(models, bad):
    ids = IDS.copy()
    ids[1, 2] = bad
    output = same(models, lambda side, model: model(side.array(ids)))
    expected = np.zeros((B, T), bool)
    # A causal model: the tokens before do not see it, nor do other rows.
    expected[1, 2:] = True
    np.testing.assert_array_equal(np.isnan(output).all(axis=-1), expected)


def test_a_position_outside_the_context_is_nan_from_there_on(models):
    # The context has six tokens.
    positions = np.array([0, 1, 9, 2])
    output = same(
        models, lambda side, model: model(side.array(IDS), positions=side.array(positions))
    )
    assert np.isnan(output).all(axis=-1).tolist() == [[False, False, True, True]] * B


def test_a_model_whose_cache_is_full_gives_nan_in_that_row(models):
    def call(side, model):
        return second_output(side, model, IDS, model.init_cache(B, 6), ([4, 1, 2], [3, 4, 4]))

    output = same(models, call)
    assert np.isnan(output).all(axis=(1, 2)).tolist() == [True, False, False]
