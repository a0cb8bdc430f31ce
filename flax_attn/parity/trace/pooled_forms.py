"""Formulas for one vector from many tokens, in plain NumPy: mean, maximum, or one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from flax_attn.parity.adapters.adapter import Arrays

Forms = Iterator[tuple[str, np.ndarray]]
POOLS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "the mean of {} over its tokens": lambda x: x.mean(1),
    "the first token of {}": lambda x: x[:, 0],
    "the last token of {}": lambda x: x[:, -1],
    "the mean of {} over its tokens but the first": lambda x: x[:, 1:].mean(1),
    "the sum of {} over its tokens": lambda x: x.sum(1),
    "the largest of {} over its tokens": lambda x: x.max(1),
}


def pooled(value: np.ndarray, sources: Arrays) -> Forms:
    """One vector `(b, d)` of tokens `(b, t, d)`, or of an image with its channels first."""
    if value.ndim != 2:
        return
    b, d = value.shape
    for name, x in sources.items():
        if x.ndim == 4 and x.shape[:2] == (b, d):
            x = x.reshape(b, d, -1).swapaxes(1, 2)
        if x.ndim == 3 and x.shape[::2] == (b, d) and x.shape[1] > 1:
            yield from ((text.format(name), pool(x)) for text, pool in POOLS.items())
