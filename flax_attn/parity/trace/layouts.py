"""Arrays that hold the same quantity in another layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, permutations

import numpy as np

# The orders of axes that are tried.
MOST = 120


def laid_out(value: np.ndarray, shape: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield an array in the layouts that give it a shape: the order it has first.

    Axes are reordered, and neighbours joined or split where the sizes allow it.

    Example:
        >>> x = np.arange(6.0).reshape(2, 3)
        >>> [y.tolist() for y in laid_out(x, (3, 2))][0]
        [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    """
    shape = tuple(shape)
    if value.shape == shape:
        yield value
    if value.size != int(np.prod(shape, dtype=int)):
        return
    own = [size for size in value.shape if size != 1]
    wanted = [size for size in shape if size != 1]
    squeezed = value.reshape(own)
    for order in _orders(own, wanted):
        if value.shape != shape or order != tuple(range(len(own))):
            yield np.ascontiguousarray(squeezed.transpose(order)).reshape(shape)
    # The axes of the result, brought into the order of those that there are.
    if len(wanted) > len(own):
        for order in _orders(wanted, own):
            moved = [wanted[axis] for axis in order]
            back = np.argsort(order)
            yield np.ascontiguousarray(squeezed.reshape(moved).transpose(back)).reshape(shape)


def _orders(sizes: list[int], joined: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield the orders of axes whose neighbours can be joined to other sizes."""
    wanted = set(np.cumprod(joined).tolist())
    for order in islice(permutations(range(len(sizes))), MOST):
        found = set(np.cumprod([sizes[axis] for axis in order]).tolist())
        if wanted <= found:
            yield order
