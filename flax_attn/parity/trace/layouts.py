"""Arrays that hold the same quantity in another layout."""

from __future__ import annotations

import math
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
    if value.size != math.prod(shape):
        return
    own = [size for size in value.shape if size != 1]
    wanted = [size for size in shape if size != 1]
    squeezed = value.reshape(own)
    unmoved = tuple(range(len(own)))
    for order in _orders(own, wanted):
        # In its own order it came first.
        if value.shape != shape or order != unmoved:
            moved = squeezed.transpose(order)
            yield np.ascontiguousarray(moved).reshape(shape)
    if len(wanted) <= len(own):
        return
    # The axes of the result, brought into the order of those that there are.
    for order in _orders(wanted, own):
        sizes = [wanted[axis] for axis in order]
        moved = squeezed.reshape(sizes).transpose(np.argsort(order))
        yield np.ascontiguousarray(moved).reshape(shape)


def _orders(sizes: list[int], joined: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield the orders of axes whose neighbours can be joined to other sizes."""
    wanted = _ends(joined)
    for order in islice(permutations(range(len(sizes))), MOST):
        ordered = [sizes[axis] for axis in order]
        if wanted <= _ends(ordered):
            yield order


def _ends(sizes: list[int]) -> set[int]:
    """Return after how many numbers each axis ends, with those before it."""
    return set(np.cumprod(sizes).tolist())
