"""The formula of these tests: held to a loop, to differences, and to a known cipher text."""

import numpy as np
import pytest

from .formula import Options, _threefry, attention, kept
from .scores import SCORES

B, T, S, N, K, H, V = 2, 3, 4, 4, 2, 5, 2


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def arrays():
    given = {"query": draw(B, T, N, H), "key": draw(B, S, K, H), "value": draw(B, S, K, V)}
    given |= {"bias": draw(N, T, 1), "sinks": draw(N)}
    given["bias"][1, 2] = -np.inf
    return given


def options(score=None):
    visible = np.random.default_rng(1).random((B, N, T, S)) < 0.7
    visible[0, 1, 1] = False
    keep = np.random.default_rng(2).random((B, N, T, S)) < 0.7
    return Options(visible, 0.7, 1.5, score, keep, 0.3)


def by_loop(given, o):
    """Return the output, one number after another."""
    output = np.zeros((B, T, N, V))
    for b, i, n in np.ndindex(B, T, N):
        k = n // (N // K)
        powers = np.zeros(S)
        for j in range(S):
            x = o.scale * given["query"][b, i, n] @ given["key"][b, j, k] + given["bias"][n, i, 0]
            hidden = not o.visible[b, n, i, j] or np.isinf(x)
            powers[j] = 0 if hidden else np.exp(o.soft_cap * np.tanh(x / o.soft_cap))
        weights = powers / (powers.sum() + np.exp(given["sinks"][n]))
        weights = weights * o.keep[b, n, i] / (1 - o.rate)
        output[b, i, n] = weights @ given["value"][b, :, k]
    return output


def test_equals_a_loop():
    found = attention(arrays(), options(), draw(B, T, N, V))
    np.testing.assert_allclose(found["output"], by_loop(arrays(), options()), rtol=1e-13)


@pytest.mark.parametrize("score", [None, *SCORES], ids=lambda score: score and score.name)
def test_gradients_are_differences(score):
    o = options(score and score.plain)
    given, cotangent = arrays(), draw(B, T, N, V, seed=3)
    found = attention(given, o, cotangent)
    for name, x in given.items():
        direction = draw(*x.shape, seed=4)
        step = 1e-6
        ends = [
            attention(given | {name: x + sign * step * direction}, o, cotangent) for sign in (1, -1)
        ]
        difference = ((ends[0]["output"] - ends[1]["output"]) * cotangent).sum() / (2 * step)
        np.testing.assert_allclose((found[name] * direction).sum(), difference, rtol=1e-7)


def test_dropout_is_threefry():
    zero, ones = np.uint32(0), np.uint32(0xFFFFFFFF)
    with np.errstate(over="ignore"):  # known answers of Random123
        assert [hex(x) for x in _threefry((zero, zero), (zero, zero))] == [
            "0x6b200159",
            "0x99ba4efe",
        ]
        assert [hex(x) for x in _threefry((ones, ones), (ones, ones))] == [
            "0x1cb996fc",
            "0xbb002be7",
        ]
    assert 0.55 < kept(0.4, np.array([1, 2], np.uint32), (2, 3, 40, 50)).mean() < 0.65


def test_a_row_that_sees_nan_is_nan_and_no_other():
    given = arrays()
    given["value"][1, 3, 0, 1] = np.nan
    found = attention(given, options(), draw(B, T, N, V))
    sees = options().visible[..., 3] & (given["bias"][..., 0] != -np.inf)
    expected = np.zeros((B, T, N), bool)
    expected[1, :, :2] = sees[1, :2].T
    assert expected.any()
    np.testing.assert_array_equal(
        np.isnan(found["output"]), np.broadcast_to(expected[..., None], (B, T, N, V))
    )
