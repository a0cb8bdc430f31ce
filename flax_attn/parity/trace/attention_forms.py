"""What a step of attention may compute, in plain NumPy: the right formula first, then those that ports confuse it with.

It shares no code with either framework, so that it can tell which of two sides is the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from einops import rearrange, repeat

from flax_attn.parity.adapters.adapter import Arrays

Forms = Iterator[tuple[str, np.ndarray]]
BASES = (10000.0, 500000.0, 1000000.0)


def scores(query: np.ndarray, key: np.ndarray, *, scale: float | None = None, tile: bool = False) -> np.ndarray:
    """Return `scale * query . key` of every query head with its key head.

    Args:
        query: `(b, t, n, h)`.
        key: `(b, s, k, h)`.
        scale: None is `1 / sqrt(h)`.
        tile: query head i reads key head `i % k`, not `i // (n / k)`.

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
    """Return key or value heads `(b, s, k, h)`, one for each of n query heads: each repeated, or all in turn.

    Example:
        >>> x = np.arange(2.0).reshape(1, 1, 2, 1)
        >>> share_heads(x, 4).ravel(), share_heads(x, 4, tile=True).ravel()
        (array([0., 0., 1., 1.]), array([0., 1., 0., 1.]))
    """
    return repeat(x, "b s k h -> b s (g k) h" if tile else "b s k h -> b s (k g) h", g=n // x.shape[2])


def rope(
    x: np.ndarray, base: float = 10000.0, *, interleaved: bool = False, sign: int = 1, shift: int = 0
) -> np.ndarray:
    """Return `(b, t, n, h)` with pair i of token p turned by `sign * (p + shift) * base ** (-2i / h)`.

    A pair is `(i, i + h/2)`, or `(2i, 2i + 1)` where `interleaved`.

    Example:
        >>> rope(np.ones((1, 2, 1, 2)))[0, :, 0].round(2)
        array([[ 1.  ,  1.  ],
               [-0.3 ,  1.38]])
    """
    h = x.shape[-1]
    pairs = "... (i two) -> two ... i" if interleaved else "... (two i) -> two ... i"
    first, second = rearrange(x, pairs, two=2)
    angles = sign * np.multiply.outer(np.arange(x.shape[1]) + shift, base ** (-2 * np.arange(h // 2) / h))
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    turned = np.stack([first * cos - second * sin, second * cos + first * sin])
    back, front = pairs.split(" -> ")
    return rearrange(turned, f"{front} -> {back}")


def split_heads(x: np.ndarray, n: int) -> dict[str, np.ndarray]:
    """Return a projection `(b, t, n * h)` as heads `(b, t, n, h)`, in the ways that it is read: the right one first."""
    b, t, d = x.shape
    return {
        "heads side by side": rearrange(x, "b t (n h) -> b t n h", n=n),
        "heads interleaved": rearrange(x, "b t (h n) -> b t n h", n=n),
        "heads by reshape without a transpose": rearrange(x.reshape(b, n, t, d // n), "b n t h -> b t n h"),
    }


def join_heads(x: np.ndarray) -> dict[str, np.ndarray]:
    """Return heads `(b, t, n, h)` as tokens `(b, t, n * h)`, in the ways that they are joined: the right one first."""
    b, t, n, h = x.shape
    return {
        "heads side by side": rearrange(x, "b t n h -> b t (n h)"),
        "heads interleaved": rearrange(x, "b t n h -> b t (h n)"),
        "heads by reshape without a transpose": rearrange(x, "b t n h -> b n t h").reshape(b, t, n * h),
    }


def head_forms(value: np.ndarray, other: np.ndarray, sources: Arrays) -> Forms:
    """Queries, keys or values: the heads of a projection, turned or not."""
    if value.ndim != 4:
        return
    b, t, n, h = value.shape
    projections = {name: x.reshape(b, t, n * h) for name, x in sources.items() if x.shape[-2:] == (t, n * h)}
    split = {name: split_heads(x, n) for name, x in projections.items()}
    for name, ways in split.items():
        yield from ((f"{name}, {way}", x) for way, x in ways.items())
    for name, ways in split.items() if value.shape[-1] % 2 == 0 else ():
        yield from _turned(name, next(iter(ways.values())))


def _turned(name: str, x: np.ndarray) -> Forms:
    for shift in (0, 1, -1):
        for base in BASES:
            for interleaved in (False, True):
                for sign in (1, -1):
                    kind = "interleaved" if interleaved else "half-split"
                    text = f"RoPE of {name}, {kind}, base {base:g}"
                    text += ", turned backwards" if sign < 0 else ""
                    text += f", positions shifted by {shift}" if shift else ""
                    yield text, rope(x, base, interleaved=interleaved, sign=sign, shift=shift)


def score_forms(value: np.ndarray, other: np.ndarray, sources: Arrays) -> Forms:
    """Scores, or what is visible of them: every query with every key."""
    if not {"query", "key"} <= sources.keys():
        return
    query, key = sources["query"], sources["key"]
    visible = np.isfinite(value)
    for text, q, k, tile in _products(query, key):
        raw = scores(q, k, scale=1.0, tile=tile)
        if raw.shape == value.shape and raw[visible].any():
            scale = float((raw[visible] @ value[visible]) / (raw[visible] @ raw[visible]))
            yield f"{text} {_scale(scale, query)}", np.where(visible, raw * scale, -np.inf)


def _products(query: np.ndarray, key: np.ndarray) -> Iterator[tuple[str, np.ndarray, np.ndarray, bool]]:
    yield "query . key", query, key, False
    if 1 < key.shape[2] < query.shape[2]:
        yield "query . key with key heads tiled, not repeated,", query, key, True
    if query.shape == key.shape:
        yield "key . query, the two swapped,", key, query, False


def _scale(scale: float, query: np.ndarray) -> str:
    n, h = query.shape[-2:]
    known = {"/ sqrt(h)": h**-0.5, "without a scale": 1.0, "/ sqrt(d_out)": (n * h) ** -0.5, "/ h": 1 / h}
    return next((text for text, number in known.items() if np.isclose(scale, number, rtol=1e-9)), f"* {scale:.6g}")


def mask_forms(value: np.ndarray, other: np.ndarray, sources: Arrays) -> Forms:
    """Which scores are hidden, and by what."""
    visible, visible_there = np.isfinite(value), np.isfinite(other)
    kept = np.where(visible, value, 0)
    if "scores" in sources:
        yield from _filled(value, kept, visible_there, sources["scores"])
    text, band = _band(visible)
    yield text, np.where(band, kept, -np.inf)
    text = "a mask" if visible.sum() >= visible_there.sum() else "the same mask inverted"
    yield text, np.where(visible_there, -np.inf, kept)
    if "scores" in sources:
        yield "a mask that is neither causal nor a window", np.where(visible, sources["scores"], -np.inf)


def _band(visible: np.ndarray) -> tuple[str, np.ndarray]:
    """Return the smallest band `i - left <= j <= i + right` around what is visible, in words and as `(t, s)`."""
    t, s = visible.shape[-2:]
    distance = np.arange(s) - np.arange(t)[:, None]
    seen = np.broadcast_to(distance, visible.shape)[visible]
    if not seen.size:
        return "a mask that hides everything", np.zeros((t, s), bool)
    left, right = int(-seen.min()), int(seen.max())
    if right >= s - 1 and left >= t - 1:
        text = "no mask"
    elif left >= t - 1:
        text = f"a causal mask, query i sees keys up to {_key(right)}"
    elif right >= s - 1:
        text = f"a mask of earlier keys, query i sees keys from {_key(-left)}"
    else:
        text = f"a sliding window, query i sees keys {_key(-left)} to {_key(right)}"
    return text, (-left <= distance) & (distance <= right)


def _key(distance: int) -> str:
    return f"i {'+' if distance > 0 else '-'} {abs(distance)}" if distance else "i"


def _filled(value: np.ndarray, kept: np.ndarray, visible_there: np.ndarray, scores: np.ndarray) -> Forms:
    # Hidden by a number, and not by -inf: it still counts.
    filled, added = value[~visible_there], (value - scores)[~visible_there]
    if filled.size > 1 and np.isfinite(filled).all():
        fill, extra = float(np.median(filled)), float(np.median(added))
        yield f"a mask that sets {fill:g} where the other side hides", np.where(visible_there, kept, fill)
        if extra:
            text = f"a mask that adds {extra:g} where the other side hides"
            yield text, np.where(visible_there, kept, scores + extra)


def softmax_forms(value: np.ndarray, other: np.ndarray, sources: Arrays) -> Forms:
    """The softmax."""
    if "masked" not in sources:
        return
    hidden = sources["masked"]
    yield "softmax over the keys", softmax(hidden)
    yield "softmax over the queries", softmax(hidden, axis=-2)
    yield "softmax over the heads", softmax(hidden, axis=1)
    yield "softmax over the keys, the mean where nothing is visible", softmax(hidden, empty=1 / value.shape[-1])
    if "scores" in sources:
        early = softmax(sources["scores"])
        yield "softmax before the mask, not divided anew", np.where(np.isfinite(hidden), early, 0)


def context_forms(value: np.ndarray, other: np.ndarray, sources: Arrays) -> Forms:
    """The sum of the values."""
    if not {"weights", "value"} <= sources.keys():
        return
    yield "weights . value", context(sources["weights"], sources["value"])
    if 1 < sources["value"].shape[2] < sources["weights"].shape[1]:
        text = "weights . value with value heads tiled, not repeated"
        yield text, context(sources["weights"], sources["value"], tile=True)


def joined_forms(value: np.ndarray, other: np.ndarray, sources: Arrays) -> Forms:
    """Heads side by side again."""
    for name, x in sources.items():
        if x.ndim == 4 and x.size == value.size and x.shape[:2] == np.reshape(value, (-1, *value.shape[-2:])).shape[:2]:
            yield from ((f"{name}, {way}", y.reshape(value.shape)) for way, y in join_heads(x).items())


STEPS: dict[str, tuple[Callable[[np.ndarray, np.ndarray, Arrays], Forms], ...]] = {
    "query": (head_forms,),
    "key": (head_forms,),
    "value": (head_forms,),
    "scores": (score_forms,),
    "masked": (mask_forms, score_forms),
    "weights": (softmax_forms,),
    "context": (context_forms,),
}
