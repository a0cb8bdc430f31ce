"""How a table of positions is resized along one axis, in plain NumPy, as a matrix of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

Kernel = Callable[[np.ndarray], np.ndarray]


def bicubic(a: float) -> Kernel:
    """Return Keys' kernel with the parameter a: -0.75 in PyTorch, -0.5 in JAX."""

    def kernel(x: np.ndarray) -> np.ndarray:
        x = np.abs(x)
        near, far = (a + 2) * x**3 - (a + 3) * x**2 + 1, a * (x**3 - 5 * x**2 + 8 * x - 4)
        return np.where(x <= 1, near, np.where(x < 2, far, 0.0))

    return kernel


def triangle(x: np.ndarray) -> np.ndarray:
    """The kernel of linear interpolation."""
    return np.maximum(0.0, 1 - np.abs(x))


def weights(
    old: int,
    new: int,
    *,
    kernel: Kernel,
    clamp: bool = True,
    corners: bool = False,
    antialias: bool = False,
    more: float = 0.0,
) -> np.ndarray:
    """Return the matrix `(new, old)` that resizes an axis.

    Args:
        old: the size before.
        new: the size after.
        kernel: the weight of a neighbour by its distance.
        clamp: whether neighbours outside count as the last element, as in PyTorch; else the weights
            inside are normalised.
        corners: whether the corners stay in place.
        antialias: whether the kernel gets wider by the factor by which the size shrinks.
        more: term added to the new size to compute the scale.

    Example:
        >>> weights(2, 4, kernel=triangle)[:2]
        array([[1.  , 0.  ],
               [0.75, 0.25]])
    """
    scale = old / (new + more)
    at = np.linspace(0, old - 1, new) if corners else (np.arange(new) + 0.5) * scale - 0.5
    wide = max(scale, 1.0) if antialias else 1.0
    reach = int(np.ceil(2 * wide)) + 1
    places = np.floor(at)[:, None] + np.arange(-reach, reach + 1)
    found, matrix = kernel((places - at[:, None]) / wide), np.zeros((new, old))
    inside = (places >= 0) & (places < old)
    found = np.where(inside, found, 0.0) if not clamp else found
    found = found / found.sum(-1, keepdims=True)
    np.add.at(matrix, (np.arange(new)[:, None], np.clip(places, 0, old - 1).astype(int)), found)
    return matrix


_TORCH, _JAX = bicubic(-0.75), bicubic(-0.5)

#: The ways to resize that ports are known to confuse, PyTorch's first.
RESIZES: Mapping[str, Callable[[int, int], np.ndarray]] = {
    "bicubic (a = -0.75, as in PyTorch)": partial(weights, kernel=_TORCH),
    "bicubic (a = -0.5, as in JAX)": partial(weights, kernel=_JAX, clamp=False, antialias=True),
    "bicubic (a = -0.5) without antialiasing": partial(weights, kernel=_JAX, clamp=False),
    "bicubic (a = -0.5) with antialiasing, as in PyTorch": partial(
        weights, kernel=_JAX, antialias=True, clamp=False
    ),
    "bicubic (a = -0.75), 0.1 added to the sizes": partial(weights, kernel=_TORCH, more=0.1),
    "bicubic (a = -0.5), 0.1 added to the sizes": partial(
        weights, kernel=_JAX, clamp=False, more=0.1
    ),
    "bicubic (a = -0.75), its corners aligned": partial(weights, kernel=_TORCH, corners=True),
    "bilinear": partial(weights, kernel=triangle),
    "bilinear with antialiasing": partial(weights, kernel=triangle, clamp=False, antialias=True),
    "bilinear, its corners aligned": partial(weights, kernel=triangle, corners=True),
}
