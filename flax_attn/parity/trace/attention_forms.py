"""Formulas for a step of attention, in plain NumPy: the right one, then common mistakes.

It shares no code with either framework, so that it can tell which of two sides is the formula.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from einops import rearrange, repeat

from flax_attn.parity.adapters.adapter import Arrays

Forms = Iterator[tuple[str, np.ndarray]]


def scores(
    query: np.ndarray, key: np.ndarray, *, scale: float | None = None, tile: bool = False
) -> np.ndarray:
    """Return `scale * query . key` of every query head with its key head.

    Args:
        query: queries `(b, t, n, h)`.
        key: keys `(b, s, k, h)`.
        scale: factor on the scores; None is `1 / sqrt(h)`.
        tile: whether query head i reads key head `i % k`, not `i // (n / k)`.

    Example:
        >>> scores(np.ones((1, 2, 1, 4)), np.ones((1, 3, 1, 4)))[0, 0, 0]
        array([2., 2., 2.])
    """
    key = share_heads(key, query.shape[2], tile)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return np.einsum("btnh,bsnh->bnts", query, key) * scale


def softmax(masked: np.ndarray, axis: int = -1, empty: float = 0.0) -> np.ndarray:
    """Return the softmax over one axis; where all is hidden, by -inf, it is `empty` at each place.

    Example:
        >>> softmax(np.array([[0.0, 0.0], [-np.inf, -np.inf]]))
        array([[0.5, 0.5],
               [0. , 0. ]])
    """
    top = np.max(masked, axis=axis, keepdims=True)
    exps = np.exp(masked - np.where(np.isfinite(top), top, 0))
    total = exps.sum(axis=axis, keepdims=True)
    return np.where(total == 0, empty, exps / np.where(total == 0, 1, total))


def context(weights: np.ndarray, value: np.ndarray, *, tile: bool = False) -> np.ndarray:
    """Return the weighted sums of the values `(b, s, k, v)`, as `(b, t, n, v)`.

    Example:
        >>> context(np.full((1, 1, 2, 3), 1 / 3), np.ones((1, 3, 1, 4))).shape
        (1, 2, 1, 4)
    """
    return np.einsum("bnts,bsnv->btnv", weights, share_heads(value, weights.shape[1], tile))


def share_heads(x: np.ndarray, n: int, tile: bool = False) -> np.ndarray:
    """Repeat key or value heads `(b, s, k, h)` for n query heads: each in a row, or all in turn.

    Example:
        >>> x = np.arange(2.0).reshape(1, 1, 2, 1)
        >>> share_heads(x, 4).ravel(), share_heads(x, 4, tile=True).ravel()
        (array([0., 0., 1., 1.]), array([0., 1., 0., 1.]))
    """
    return repeat(
        x, "b s k h -> b s (g k) h" if tile else "b s k h -> b s (k g) h", g=n // x.shape[2]
    )


def split_heads(x: np.ndarray, n: int) -> dict[str, np.ndarray]:
    """Split a projection `(b, t, n * h)` into heads `(b, t, n, h)`, the right way first."""
    b, t, d = x.shape
    return {
        "heads side by side": rearrange(x, "b t (n h) -> b t n h", n=n),
        "heads interleaved": rearrange(x, "b t (h n) -> b t n h", n=n),
        "heads by reshape without a transpose": rearrange(
            x.reshape(b, n, t, d // n), "b n t h -> b t n h"
        ),
    }


def join_heads(x: np.ndarray) -> dict[str, np.ndarray]:
    """Join heads `(b, t, n, h)` into tokens `(b, t, n * h)`, the right way first."""
    b, t, n, h = x.shape
    return {
        "heads side by side": rearrange(x, "b t n h -> b t (n h)"),
        "heads interleaved": rearrange(x, "b t n h -> b t (h n)"),
        "heads by reshape without a transpose": (
            rearrange(x, "b t n h -> b n t h").reshape(b, t, n * h)
        ),
    }


def score_forms(value: np.ndarray, other: np.ndarray, sources: Arrays) -> Forms:
    """Scores, or what is visible of them: every query with every key."""
    if not _heads(sources, "query", "key"):
        return
    query, key = sources["query"], sources["key"]
    for text, q, k, tile in _products(query, key):
        for scale, scaled in scaled_forms(scores(q, k, scale=1.0, tile=tile), value, query):
            yield f"{text} {scale}", scaled


def scaled_forms(raw: np.ndarray, value: np.ndarray, query: np.ndarray) -> Forms:
    """Scores times the number that fits best, hidden where those of a side are."""
    visible = np.isfinite(value)
    if raw.shape == value.shape and raw[visible].any():
        scale = float((raw[visible] @ value[visible]) / (raw[visible] @ raw[visible]))
        yield scale_in_words(scale, query), np.where(visible, raw * scale, -np.inf)


def _heads(sources: Arrays, *names: str) -> bool:
    """Whether these are there and have heads: a projection may have the name of a step."""
    return all(name in sources and sources[name].ndim == 4 for name in names)


def _products(
    query: np.ndarray, key: np.ndarray
) -> Iterator[tuple[str, np.ndarray, np.ndarray, bool]]:
    yield "query . key", query, key, False
    if 1 < key.shape[2] < query.shape[2]:
        yield "query . key with key heads tiled, not repeated,", query, key, True
    if query.shape == key.shape:
        yield "key . query, the two swapped,", key, query, False


def scale_in_words(scale: float, query: np.ndarray, close: float = 1e-9) -> str:
    """Return what scores are multiplied by, in the words of a formula.

    Example:
        >>> scale_in_words(0.5, np.ones((1, 3, 2, 4)))
        '/ sqrt(h)'
    """
    n, h = query.shape[-2:]
    known = {
        "/ sqrt(h)": h**-0.5,
        "without a scale": 1.0,
        "/ sqrt(d_out)": (n * h) ** -0.5,
        "/ h": 1 / h,
    }
    fits = (text for text, number in known.items() if np.isclose(scale, number, rtol=close, atol=0))
    return next(fits, f"* {scale:.6g}")


def softmax_forms(value: np.ndarray, other: np.ndarray, sources: Arrays) -> Forms:
    """The softmax."""
    if "masked" not in sources:
        return
    hidden = sources["masked"]
    yield "softmax over the keys", softmax(hidden)
    yield "softmax over the queries", softmax(hidden, axis=-2)
    yield "softmax over the heads", softmax(hidden, axis=1)
    yield (
        "softmax over the keys, the mean where nothing is visible",
        softmax(hidden, empty=1 / value.shape[-1]),
    )
    if "scores" in sources:
        early = softmax(sources["scores"])
        yield "softmax before the mask, not divided anew", np.where(np.isfinite(hidden), early, 0)


def context_forms(value: np.ndarray, other: np.ndarray, sources: Arrays) -> Forms:
    """The sum of the values."""
    if not _heads(sources, "weights", "value"):
        return
    yield "weights . value", context(sources["weights"], sources["value"])
    if 1 < sources["value"].shape[2] < sources["weights"].shape[1]:
        text = "weights . value with value heads tiled, not repeated"
        yield text, context(sources["weights"], sources["value"], tile=True)


def joined_forms(value: np.ndarray, other: np.ndarray, sources: Arrays) -> Forms:
    """Heads side by side again."""
    for name, x in sources.items():
        if (
            x.ndim == 4
            and x.size == value.size
            and x.shape[:2] == np.reshape(value, (-1, *value.shape[-2:])).shape[:2]
        ):
            yield from (
                (f"{name}, {way}", y.reshape(value.shape)) for way, y in join_heads(x).items()
            )
