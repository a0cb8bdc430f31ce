"""Attention in plain NumPy, one step at a time, with the variations that ports get wrong: the third opinion.

It shares no code with either framework, so that it can tell which of two sides is the formula.
"""

from __future__ import annotations

import numpy as np
from einops import rearrange, repeat


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


def causal(t: int, s: int, offset: int = 0) -> np.ndarray:
    """Return `(t, s)`: whether the query at `offset + i` sees key j.

    Example:
        >>> causal(2, 3, offset=1).astype(int)
        array([[1, 1, 0],
               [1, 1, 1]])
    """
    return np.arange(s) <= np.arange(t)[:, None] + offset


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
