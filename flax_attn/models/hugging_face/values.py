"""Weights of files as values of variables, on one device or split over a mesh."""

import math
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from flax_attn.sharding.parameters import sharding_of

_ALIGNMENT, _PIECE = 64, 2**26  # bytes
Span = tuple[int, int, int]  # first, end and step


class Memory:
    """Memory for arrays, aligned as JAX needs it on a CPU to take it over without a copy.

    It is allocated in large pieces: these have huge pages, and take a third of the time.
    """

    def __init__(self):
        self.free = np.empty(0, np.uint8)

    def copy(
        self,
        arrays: list[np.ndarray],
        variable: nnx.Variable | jax.ShapeDtypeStruct,
        dtype: np.dtype,
    ) -> Array:
        """Return the value of a variable: one array, or those of all layers and experts stacked.

        An array that lies as JAX needs it is not copied: of a file, it is mapped.
        """
        first = arrays[0]
        if len(arrays) == 1 and _lies_as_needed(first, dtype):
            value = first.view(np.ndarray)
        else:
            shape = len(arrays), *first.shape
            size = math.prod(shape) * dtype.itemsize
            value = self._take(size).view(dtype).reshape(shape)
            for i, array in enumerate(arrays):
                value[i] = array
        # Layers and experts may have an axis each.
        return jax.device_put(value.reshape(variable.shape))

    def _take(self, size: int) -> np.ndarray:
        # A part of the piece that was allocated last, with room to align it.
        if self.free.size < size + _ALIGNMENT:
            self.free = np.empty(max(size, _PIECE) + _ALIGNMENT, np.uint8)
        start = -self.free.ctypes.data % _ALIGNMENT
        taken, self.free = np.split(self.free[start:], [size])
        return taken


def _lies_as_needed(array: np.ndarray, dtype: np.dtype) -> bool:
    # What is donated is written to: nothing that cannot be may be shared.
    flags = array.flags
    aligned = array.ctypes.data % _ALIGNMENT == 0
    return array.dtype == dtype and flags.c_contiguous and flags.writeable and aligned


class OnMesh:
    """Makes the values of a model's variables on a mesh, from arrays that files are mapped to.

    Args:
        mesh: mesh that the variables are split over, by the names of their axes.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh

    def copy(self, arrays: list[np.ndarray], variable: nnx.Variable, dtype: np.dtype) -> Array:
        """Return the value of a variable: one array, or those of all layers and experts stacked."""
        found: dict[tuple[Span, ...], np.ndarray] = {}
        shape = variable.shape

        def part(index: Any) -> np.ndarray:
            spans = _spans(index, shape)
            # Devices that have the same part share its copy.
            if spans not in found:
                found[spans] = _part(arrays, shape, spans, dtype)
            return found[spans]

        sharding = sharding_of(variable, self.mesh)
        return jax.make_array_from_callback(shape, sharding, part)


def _spans(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[Span, ...]:
    # Slices have no hash before Python 3.12, and may leave out their ends.
    sized = zip(index, shape, strict=True)
    return tuple(one.indices(size) for one, size in sized)


def _part(
    arrays: list[np.ndarray], shape: tuple[int, ...], spans: tuple[Span, ...], dtype: Any
) -> np.ndarray:
    """Return a copy in this dtype of a part of the array of this shape that they stack to."""
    index = tuple(slice(*span) for span in spans)
    # The first axes count the arrays: those of layers and of experts.
    lead = len(shape) - arrays[0].ndim
    numbers = np.arange(len(arrays)).reshape(shape[:lead])
    chosen = numbers[index[:lead]]
    inner = index[lead:]
    # Views of what files are mapped to: nothing is read yet.
    parts = [arrays[i][inner] for i in chosen.flat]
    size = parts[0].shape
    new = np.empty((len(parts), *size), dtype)
    for i, part in enumerate(parts):
        new[i] = part
    return new.reshape(*chosen.shape, *size)
