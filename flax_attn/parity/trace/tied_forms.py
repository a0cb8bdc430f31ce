"""Products with the weights of another layer, such as tied embeddings, in plain NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flax_attn.parity.adapters.adapter import Arrays

Forms = Iterator[tuple[str, np.ndarray]]
SOURCES = 4  # that are tried, the last


def tied_products(value: np.ndarray, sources: Arrays, weights: Arrays) -> Forms:
    """Yield logits: `x @ matrix.T`, plain or with a soft cap, `cap * tanh(logits / cap)`."""
    products = [
        (f"{name} @ {other}.T", x @ w.T)
        for name, x in list(sources.items())[: -SOURCES - 1 : -1]
        for other, w in weights.items()
        if w.ndim == 2 and x.shape[-1:] == w.shape[1:] and (*x.shape[:-1], len(w)) == value.shape
    ]
    yield from products
    for text, y in products:
        cap = _cap(value, y)
        if cap is not None:
            yield f"{text}, soft-capped at {cap:g}", cap * np.tanh(y / cap)


def _cap(value: np.ndarray, y: np.ndarray) -> float | None:
    """Return the cap c for which c tanh(y / c) is the value, to six digits, as people write it."""
    at = np.unravel_index(np.abs(y).argmax(), y.shape)
    capped, whole = float(np.abs(value[at])), float(np.abs(y[at]))
    if not 0 < capped < whole:
        return None
    low, high = capped, capped
    while (
        high * np.tanh(whole / high) < capped and high < 1e9
    ):  # it grows with the cap, up to the value itself
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * np.tanh(whole / middle) < capped else (low, middle)
    return float(f"{high:.6g}")
