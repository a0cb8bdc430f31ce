"""Layers whose variables are stacked along a first axis, seen one by one: as layouts name and store them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx
from jax import Array

from flax_attn.convert.rules import Shape

_CHILD = "block"  # of a module that has `stacked_layers`: the one whose variables are stacked


@dataclass(frozen=True)
class LayerSlice:
    """The part of a stacked variable that is that of one layer."""

    variable: nnx.Variable
    layer: int

    @property
    def shape(self) -> Shape:
        return self.variable.shape[1:]

    @property
    def dtype(self) -> np.dtype:
        return self.variable.dtype

    @property
    def nbytes(self) -> int:
        return self.variable.nbytes // self.variable.shape[0]

    def __getitem__(self, index: Any) -> Array:
        return self.variable[self.layer][index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.variable[self.layer], dtype)


Tensor = nnx.Variable | LayerSlice


def depth(module: object) -> int | None:
    """Return how many layers a module stacks; None where it stacks none."""
    return getattr(module, "stacked_layers", None)


def layers_of(path: tuple, stacks: Mapping[tuple, int]) -> Iterator[tuple[tuple, int | None]]:
    """Return the paths of a node as if no layers were stacked, each with its layer; `stacks` has their depths.

    Example:
        >>> list(layers_of(("blocks", "block", "norm"), {("blocks",): 2}))
        [(('blocks', 0, 'norm'), 0), (('blocks', 1, 'norm'), 1)]
    """
    for i, part in enumerate(path):
        if part == _CHILD and path[:i] in stacks:
            yield from (((*path[:i], layer, *path[i + 1 :]), layer) for layer in range(stacks[path[:i]]))
            return
    yield path, None


def whole(tensors: Mapping[str, Tensor], arrays: Mapping[str, Any]) -> Iterator[tuple[nnx.Variable, list[Any]]]:
    """Return each variable with its arrays: its only one, or those of all its layers in order."""
    stacked: dict[int, dict[int, str]] = {}
    for name, array in arrays.items():
        tensor = tensors[name]
        if isinstance(tensor, LayerSlice):
            stacked.setdefault(id(tensor.variable), {})[tensor.layer] = name
        else:
            yield tensor, [array]
    for names in stacked.values():
        yield tensors[names[0]].variable, [arrays[names[layer]] for layer in range(len(names))]
