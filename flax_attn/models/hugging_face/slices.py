"""Weights of files on a mesh: of each one the parts of the devices at hand are read, and no more."""

from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from flax_attn.sharding.parameters import sharding_of

Span = tuple[int, int, int]  # first, end and step


class OnMesh:
    """Makes the values of a model's variables on a mesh, from arrays that files are mapped to.

    Args:
        mesh: that the names of the axes of the variables split them over.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh

    def copy(self, arrays: list[np.ndarray], variable: nnx.Variable, dtype: np.dtype) -> Array:
        """Return arrays as one, the value of a variable: the only one, or those of all layers."""
        found: dict[tuple[Span, ...], np.ndarray] = {}

        def part(index: Any) -> np.ndarray:
            spans = tuple(span.indices(size) for span, size in zip(index, variable.shape, strict=True))
            if spans not in found:  # devices that have the same part
                found[spans] = _part(arrays, tuple(slice(*span) for span in spans), dtype)
            return found[spans]

        return jax.make_array_from_callback(variable.shape, sharding_of(variable, self.mesh), part)


def _part(arrays: list[np.ndarray], index: tuple[slice, ...], dtype: Any) -> np.ndarray:
    """Return a part of an array, or of arrays as if they were stacked: a copy, in this dtype."""
    stacked = len(index) > arrays[0].ndim
    layers, inner = (index[0], index[1:]) if stacked else (slice(1), index)
    parts = [array[inner] for array in arrays[layers]]
    new = np.empty((len(parts), *parts[0].shape), dtype)
    for i, part in enumerate(parts):
        new[i] = part
    return new if stacked else new[0]
