"""An index probe: every element has a number, and is looked for after conversion."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flax_attn.parity.pair import Pair


def index_probe(pair: Pair) -> Iterator[tuple[str, float]]:
    """Yield how many elements of each entry are wrong after conversion and back."""
    # No element is 0: what is left unset would have that.
    start = 1
    elements = [np.arange(0)]
    for entry in pair.entries:
        end = start + int(np.prod(entry.shape))
        numbers = np.arange(start, end).reshape(entry.shape)
        parts = entry.split(numbers)
        back = entry.join(parts)
        yield entry.theirs, _wrong(back, numbers)
        elements += [np.ravel(part) for part in parts.values()]
        start = end
    found = np.sort(np.concatenate(elements))
    expected = np.arange(1, start)
    yield "every element once", _wrong(found, expected)


def _wrong(found: np.ndarray, expected: np.ndarray) -> float:
    """Return how many elements are wrong, infinity if the shape is."""
    if found.shape != expected.shape:
        return np.inf
    return float((found != expected).sum())
