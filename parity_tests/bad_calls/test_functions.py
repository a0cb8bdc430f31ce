"""Bad functions of indices, as masks and as scores: the same error message on both sides."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_attn

pytestmark = pytest.mark.usefixtures("no_shape_checks")
QUERY, KEY = (2, 5, 4, 6), (2, 7, 2, 6)


def masked(function, *offset):
    """Return an action that attends under a mask; the function gets an array of the side."""

    def act(side):
        array = side.array(np.arange(12).reshape(3, 4), "int32")
        made = function(array) if callable(function) else function
        return attend(side, mask=side.Mask.where(made, *offset))

    return act


def scored(function, dtype="float64", **positions):
    """Return an action that attends with a function of scores, which gets an array as well."""

    def act(side):
        array = side.array(np.ones(3), "float32")
        made = function(array) if callable(function) else function
        given = {name: side.array(x) for name, x in positions.items()}
        return attend(side, dtype, score=side.ScoreFunction(made, **given) if given else made)

    return act


def attend(side, dtype="float64", **options):
    query, key = (side.array(np.ones(shape), dtype) for shape in (QUERY, KEY))
    return side.dot_product_attention(query, key, key, **options)


INDICES = "with b, n, i, j the indices of batch row, query head, query and key"
SAME = {
    # What is no function.
    "no function": (
        masked(3),
        rf"function of a mask is fn\(b, n, i, j\), {INDICES}; got int\. Pass a function",
    ),
    "no score function": (
        scored(3),
        r"function of a score is fn\(score, b, n, i, j\), .*; got int\. Pass a function",
    ),
    # Numbers of arguments.
    "three indices": (
        masked(lambda x: lambda n, i, j: i > j),
        r"got one that takes \(n, i, j\)\. Take all 4",
    ),
    "five indices": (
        masked(lambda x: lambda s, b, n, i, j: i > j),
        r"got one that takes \(s, b, n, i, j\)",
    ),
    "no score": (
        scored(lambda x: lambda b, n, i, j: 1.0),
        r"got one that takes \(b, n, i, j\)\. Take all 5",
    ),
    # What a function returns.
    "nothing": (
        masked(lambda x: lambda b, n, i, j: None),
        r"of a mask returns one array; got NoneType\.",
    ),
    "two": (
        scored(lambda x: lambda s, b, n, i, j: (s, s)),
        r"of a score returns one array; got tuple\. Return",
    ),
    "an array": (
        masked(lambda x: lambda b, n, i, j: x > 3),
        r"for one \(b, n, i, j\), True = attend; got an array",
    ),
    "scores": (
        scored(lambda x: lambda s, b, n, i, j: s[None]),
        r"dtype of the score; got an array for one\. Index",
    ),
    # Dtypes of scores.
    "boolean score": (
        scored(lambda x: lambda s, b, n, i, j: s > 1),
        r"here float64; got dtype bool\. Return a",
    ),
    "another dtype": (
        scored(lambda x: lambda s, b, n, i, j: x[0] * (s.ndim + 1)),
        (
            r"in the dtype of the score, here float64; got dtype float32\. Cast what it adds or"
            r" multiplies to score\.dtype"
        ),
    ),
    # Positions.
    "offset": (
        masked(lambda x: lambda b, n, i, j: i > j, 2**31),
        (
            r"positions that the function of a mask gets are integers of 32 bits; got"
            r" offset=2147483648\. Count from"
        ),
    ),
    "query positions": (
        scored(lambda x: lambda s, b, n, i, j: s, query_positions=np.arange(6)),
        (
            r"query_positions of a score are one integer a token, of shape \(2, 5\) or \(5,\); got"
            r" shape \(6,\)\. Those of"
        ),
    ),
    "float positions": (
        scored(lambda x: lambda s, b, n, i, j: s, key_positions=np.ones((2, 7))),
        (
            r"key_positions of a score .* \(7,\); got shape \(2, 7\), not integers\. .*KVCache are"
            r" cache\.positions\(t\)"
        ),
    ),
    # A mask that was made for another call.
    "rows": (
        lambda side: (
            side.Mask.where(lambda b, n, i, j: i + b > j + n).sized(3, None).materialise(2, 1, 4, 4)
        ),
        r"this mask of a function is one for b=3; got b=2\. Make it again",
    ),
}
ALIKE = {
    # Before a call it is not known how many heads there are.
    "unknown heads": (
        lambda side: _beside_a_ring_buffer(side, side.Mask.where(lambda b, n, i, j: i + b > j + n)),
        r"reads b or n has to know .*; got b=\d, n=None\. Say it first: mask\.sized\(b, n\)",
    ),
    "no boolean": (
        masked(lambda x: lambda b, n, i, j: i - j),
        r"True = attend; got dtype int\d\d\. Compare: i - j",
    ),
    # Functions are called once, with arrays of indices.
    "and": (
        masked(lambda x: lambda b, n, i, j: i > j and j > 2),
        r"mask is called once .*: write & and \| in",
    ),
    "if": (
        scored(lambda x: lambda s, b, n, i, j: s if i > j else -s),
        r"score is called once .* where in place of if",
    ),
}


def _beside_a_ring_buffer(side, mask):
    dtype = side.array(np.ones(1)).dtype
    new = side.array(np.ones((2, 3, 2, 3)))
    cache = side.KVCache.zeros(2, 4, 2, 3, window=3, dtype=dtype)
    first = cache.extend(new, new, mask.sized(None, 2))
    return first.cache.extend(new, new, mask)


@pytest.mark.parametrize(("act", "match"), SAME.values(), ids=SAME)
def test_the_same_words(assert_same_error, act, match):
    assert_same_error(act, match)


@pytest.mark.parametrize(("act", "match"), ALIKE.values(), ids=ALIKE)
def test_the_same_rule_with_the_remedy_of_the_framework(side, error_of, act, match):
    assert re.search(match, error_of(side, act))


def test_scores_of_a_module_check_their_function(assert_same_error):
    assert_same_error(
        lambda side: side.Scores(function=abs), r"function of a score is fn\(score, b, n, i, j\)"
    )


def test_an_array_of_numpy_has_no_values_at_an_index(sides, error_of):
    act = masked(lambda x: lambda b, n, i, j: np.arange(9)[i] > j)
    assert re.search("index arrays of the framework, not of NumPy", error_of(sides[0], act))


def test_a_slot_without_a_key_is_not_told_of(side):
    x = side.array(np.ones((1, 3, 1, 4)))

    def loss(slope):
        options = {"mask": side.Mask.lengths(key=2), "score": beside_a_free_slot(side, slope)}
        return side.dot_product_attention(x, x * slope, x * slope, **options).sum()

    assert np.isfinite(side.gradients(loss, side.array(np.array(0.5)))[0])


def beside_a_free_slot(side, slope):
    """Return a function of scores; a slot without a key has position -1, the place of a NaN."""
    table = side.array(np.array([1.0, 2.0, 3.0, np.nan]))
    positions = side.array(np.array([0, 1, -1]))
    function = lambda s, b, n, i, j: s + slope * table[j]  # noqa: E731
    return side.ScoreFunction(function, key_positions=positions)


GOOD = {
    "of indices": masked(lambda x: lambda b, n, i, j: (x[b, n] > i) | (j == 0)),
    "a constant": masked(lambda x: lambda b, n, i, j: True),
    "of any number": scored(lambda x: lambda s, *indices: s, "float32"),
}


@pytest.mark.parametrize("act", GOOD.values(), ids=GOOD)
def test_good_functions_pass(side, act):
    assert tuple(act(side).shape) == QUERY


def under(function):
    x = jnp.ones(QUERY, jnp.float32)
    return flax_attn.dot_product_attention(x, x, x, mask=flax_attn.Mask.where(function))


def with_scores(function):
    x = jnp.ones(QUERY, jnp.float32)
    return flax_attn.dot_product_attention(x, x, x, score=function)


SHORT = jnp.ones((4, 3), jnp.float32)
TOO_SHORT = {
    "rows": (under, lambda b, n, i, j: SHORT[0, :1][b] > 0, "mask", 1, "b", 1),
    "heads": (under, lambda b, n, i, j: SHORT[0][n] > 0, "mask", 3, "n", 3),
    "queries": (under, lambda b, n, i, j: SHORT[n, i] > 0, "mask", 3, "i", 4),
    "keys, one axis after the other": (
        under,
        lambda b, n, i, j: SHORT[n][j] > 0,
        *("mask", 3, "j", 4),
    ),
    "heads of scores": (with_scores, lambda x, b, n, i, j: x + SHORT[0][n], "score", 3, "n", 3),
    "queries of scores": (with_scores, lambda x, b, n, i, j: x + SHORT[n, i], "score", 3, "i", 4),
    "keys of scores": (with_scores, lambda x, b, n, i, j: x * SHORT[n, j], "score", 3, "j", 4),
}


@pytest.mark.parametrize("name", TOO_SHORT)
def test_an_array_that_is_too_short_for_an_index_is_refused(name):
    act, function, what, size, index, last = TOO_SHORT[name]
    rule = (
        rf"function of a {what} reads an axis of {size} entries at {index}, which goes from 0 to"
        rf" {last}: .* jnp\.minimum\({index}, {size - 1}\)"
    )
    with pytest.raises(ValueError, match=rule):
        act(function)


BOUNDED = {
    "minimum": lambda b, n, i, j: SHORT[0][jnp.minimum(j, 2)] > 0,
    "where": lambda b, n, i, j: SHORT[0][jnp.where(j < 3, j, 0)] > 0,
    "select": lambda b, n, i, j: SHORT[0][jax.lax.select(j > 2, jnp.minimum(j, 2), j)] > 0,
    "a distance": lambda b, n, i, j: SHORT[0][i - j] > 0,
}


@pytest.mark.parametrize("name", BOUNDED)
def test_an_index_may_be_kept_within_an_array(name):
    assert under(BOUNDED[name]).shape == QUERY


def test_queries_behind_an_offset_are_positions():
    mask = flax_attn.Mask.where(lambda b, n, i, j: SHORT[0][i] > 0, offset=2)
    mask.resolve(1, 1, 1, 5)
    with pytest.raises(ValueError, match=r"3 entries at i, which goes from 0 to 3"):
        mask.resolve(1, 1, 2, 5)
