"""The formula and its gradients in NumPy: nothing is taken from flax_attn.

weights = dropout(softmax(mask(score(soft_cap(scale * query @ key^T + bias))), sinks))
output  = weights @ value
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Options:
    """What changes the formula.

    Args:
        visible: mask `(b, n, t, s)`.
        scale: factor on the scores.
        soft_cap: None or the bound.
        score: None or a function of scores that returns the new ones and its derivative.
        keep: None or the weights that dropout keeps, `(b, n, t, s)`.
        rate: dropout rate.
    """

    visible: np.ndarray
    scale: float
    soft_cap: float | None = None
    score: Callable | None = None
    keep: np.ndarray | None = None
    rate: float = 0.0


def attention(
    given: Arrays, options: Options, cotangent: np.ndarray, product: Callable = np.matmul
) -> Arrays:
    """Return output, weights and gradients, in the dtype of what is given.

    Matrices are multiplied by `product`. Gradients by scores are given with the sums of the sizes
    of their terms, which may cancel. Rows that see what is not finite are NaN in the output; their
    gradients stand as if it were 0.
    """
    dtype = given["query"].dtype
    group = given["query"].shape[2] // given["key"].shape[2]
    bias = given.get("bias", np.zeros((1, 1, 1, 1), dtype))
    bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    shown = options.visible & (bias != -np.inf)
    bad = _rows_not_finite(given, shown, group)

    q = _finite(given["query"]).transpose(0, 2, 1, 3)  # heads first
    k = np.repeat(_finite(given["key"]).transpose(0, 2, 1, 3), group, axis=1)
    v = np.repeat(_finite(given["value"]).transpose(0, 2, 1, 3), group, axis=1)
    scale = dtype.type(options.scale)
    finite_bias = np.where(bias == -np.inf, 0, bias).astype(dtype)
    sums = product(q, k.swapaxes(-1, -2)) * scale + finite_bias
    scores, slope = _changed(sums, options)
    sinks = given.get("sinks")
    if sinks is not None:
        sinks = np.where(sinks < np.inf, sinks, 0)
    weights, of_sinks = _softmax(np.where(shown, scores, -np.inf), sinks)
    kept = weights if options.keep is None else weights * _dropout(options, dtype)

    output = product(kept, v).transpose(0, 2, 1, 3)
    found = {"output": np.where(bad.transpose(0, 2, 1, 3), np.nan, output)}
    found["weights"] = np.where(bad & shown, np.nan, kept)
    d_out = cotangent.transpose(0, 2, 1, 3)
    d_weights = product(d_out, v.swapaxes(-1, -2))
    if options.keep is not None:
        d_weights = d_weights * _dropout(options, dtype)
    mean = (d_weights * weights).sum(axis=-1, keepdims=True)
    d_scores = weights * (d_weights - mean)
    d_sums = np.where(weights > 0, d_scores * slope, 0)
    terms = weights * (abs(d_weights) + abs(mean)) * abs(slope)
    found["terms of query"] = (terms @ abs(k) * abs(scale)).transpose(0, 2, 1, 3)
    found["terms of key"] = _grouped(terms.swapaxes(-1, -2) @ abs(q) * abs(scale), group)
    found["query"] = (product(d_sums, k) * scale).transpose(0, 2, 1, 3)
    found["key"] = _grouped(product(d_sums.swapaxes(-1, -2), q) * scale, group)
    found["value"] = _grouped(product(kept.swapaxes(-1, -2), d_out), group)
    if "bias" in given:
        found["bias"] = _summed(d_sums, given["bias"].shape)
        found["terms of bias"] = _summed(terms, given["bias"].shape)
    if "sinks" in given:
        found["sinks"] = -(of_sinks * mean).sum(axis=(0, 2, 3))
        found["terms of sinks"] = abs(of_sinks * mean).sum(axis=(0, 2, 3))
    return found


def not_finite(given: Arrays, options: Options) -> dict[str, np.ndarray]:
    """Return where gradients are not defined: of rows that see NaN, and what they read."""
    group = given["query"].shape[2] // given["key"].shape[2]
    bias = given.get("bias", np.zeros((1, 1, 1, 1)))
    shown = options.visible & (bias.reshape((1,) * (4 - bias.ndim) + bias.shape) != -np.inf)
    bad = _rows_not_finite(given, shown, group)
    keys = (bad & shown).any(axis=2)  # (b, n, s)
    b, n, s = keys.shape
    keys = keys.reshape(b, n // group, group, s).any(axis=2).transpose(0, 2, 1)
    own = {name: ~np.isfinite(given[name]).all(axis=-1) for name in ("query", "key", "value")}
    rows = bad[..., 0].transpose(0, 2, 1)
    return {"query": rows | own["query"], "key": keys | own["key"], "value": keys | own["value"]}


def one_after_another(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the product of matrices, its terms added one after another."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
    for i in range(a.shape[-1]):
        total += a[..., i, None] * b[..., i, None, :]
    return total


def kept(rate: float, key: np.ndarray, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Return what dropout keeps: `threefry(threefry(key, (b, n)), (t, s))[0] >= rate * 2**32`."""
    b, n, t, s = (x.astype(np.uint32) for x in np.ogrid[tuple(slice(size) for size in shape)])
    with np.errstate(over="ignore"):
        bits, _ = _threefry(_threefry((key[0], key[1]), (b, n)), (t, s))
    return bits >= np.uint32(min(round(rate * 2**32), 2**32 - 1))


def _threefry(key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    # Salmon et al. 2011, Threefry-2x32 of 20 rounds.
    parity = np.uint32(0x1BD11BDA)
    words = (key[0], key[1], key[0] ^ key[1] ^ parity)
    x, y = counter[0] + words[0], counter[1] + words[1]
    turns = (13, 15, 26, 6, 17, 29, 16, 24)
    for number in range(20):
        turn = np.uint32(turns[number % 8])
        x = x + y
        y = (y << turn | y >> np.uint32(32 - turn)) ^ x
        if number % 4 == 3:
            step = number // 4 + 1
            x = x + words[step % 3]
            y = y + words[(step + 1) % 3] + np.uint32(step)
    return x, y


def _finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x).all(axis=-1, keepdims=True), x, 0).astype(x.dtype)


def _rows_not_finite(given: Arrays, shown: np.ndarray, group: int) -> np.ndarray:
    """Return the rows that see something of which a number is not finite, `(b, n, t, 1)`."""
    query, key, value = (np.isfinite(given[x]).all(axis=-1) for x in ("query", "key", "value"))
    if "sinks" in given:  # one of -inf is none; any other that is not finite is read by all rows
        query = query & (given["sinks"] < np.inf)
    keys = np.repeat((key & value).transpose(0, 2, 1), group, axis=1)
    bad = ~(query.transpose(0, 2, 1)[..., None] & keys[:, :, None])
    return (shown & bad).any(axis=-1, keepdims=True)


def _changed(sums: np.ndarray, options: Options) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores after soft cap and function, and their derivatives by the sums."""
    scores, slope = sums, np.ones_like(sums)
    if options.soft_cap is not None:
        cap = sums.dtype.type(options.soft_cap)
        bent = np.tanh(scores / cap)
        scores, slope = cap * bent, 1 - bent * bent
    if options.score is not None:
        scores, more = options.score(scores)
        slope = slope * more
    return scores, slope


def _softmax(scores: np.ndarray, sinks: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of keys, and those of sinks `(b, n, t, 1)`."""
    columns = scores
    if sinks is not None:  # one more key, of which nothing is read
        column = np.broadcast_to(sinks.astype(scores.dtype)[:, None, None], (*scores.shape[:3], 1))
        columns = np.concatenate([scores, column], axis=-1)
    top = columns.max(axis=-1, keepdims=True)
    powers = np.exp(columns - np.where(np.isfinite(top), top, 0).astype(scores.dtype))
    total = powers.sum(axis=-1, keepdims=True)
    weights = powers / np.where(total == 0, 1, total).astype(scores.dtype)
    return weights[..., : scores.shape[-1]], weights[..., scores.shape[-1] :]


def _dropout(options: Options, dtype: Any) -> np.ndarray:
    return (options.keep / (1 - options.rate)).astype(dtype)


def _grouped(gradient: np.ndarray, group: int) -> np.ndarray:
    b, n, s, width = gradient.shape
    return gradient.reshape(b, n // group, group, s, width).sum(axis=2).transpose(0, 2, 1, 3)


def _summed(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    padded = (1,) * (4 - len(shape)) + shape
    axes = tuple(axis for axis, size in enumerate(padded) if size == 1)
    return gradient.sum(axis=axes, keepdims=True).reshape(shape)
