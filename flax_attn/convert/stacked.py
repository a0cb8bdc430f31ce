"""Layers with variables stacked along a first axis, seen one by one, as layouts name them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx
from jax import Array

from flax_attn.convert.rules import Shape

# The attribute of a module with `stacked_layers`: the child with stacked variables, or a list.
_CHILD = "block"
# The numbers of the layers in each stacked child.
Layers = tuple[tuple[int, ...], ...]


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


def stacked_layers(module: object) -> Layers | None:
    """Return the numbers of the layers in each stacked child of a module; None without any."""
    return getattr(module, "stacked_layers", None)


def children(module: Any, layers: Layers) -> dict[int, tuple[Any, int]]:
    """Return the stacked child of each layer, in order, with the index of the layer in it."""
    # A module whose layers are all of one kind holds its stacked child itself, not in a list.
    stacked = [module.block] if len(layers) == 1 else module.block
    return {layer: (stacked[child], i) for layer, (child, i) in enumerate(places(layers))}


def places(layers: Layers) -> list[tuple[int, int]]:
    """Return the number of the stacked child of each layer, in order, with its index there.

    Example:
        >>> places(((0,), (1, 3), (2, 4)))
        [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1)]
    """
    where = {}
    for child, own in enumerate(layers):
        # A child may hold layers that do not follow one another.
        where |= {layer: (child, i) for i, layer in enumerate(own)}
    return [where[layer] for layer in range(len(where))]


def layers_of(path: tuple, stacks: Mapping[tuple, Layers]) -> Iterator[tuple[tuple, int | None]]:
    """Yield the paths of a node as if no layers were stacked, each with its index in its child.

    Example:
        >>> list(layers_of(("blocks", "block", "norm"), {("blocks",): ((0, 1),)}))
        [(('blocks', 0, 'norm'), 0), (('blocks', 1, 'norm'), 1)]
        >>> list(layers_of(("blocks", "block", 1, "norm"), {("blocks",): ((0,), (1, 2))}))
        [(('blocks', 1, 'norm'), 0), (('blocks', 2, 'norm'), 1)]
    """
    for i, part in enumerate(path):
        layers = stacks.get(path[:i])
        if part != _CHILD or not layers:
            continue
        rest = path[i + 1 :]
        child = 0
        if len(layers) > 1:
            # The list of children itself has no name.
            if not rest:
                return
            child, *rest = rest
        for place, layer in enumerate(layers[child]):
            yield (*path[:i], layer, *rest), place
        return
    yield path, None


def whole(
    tensors: Mapping[str, Tensor], arrays: Mapping[str, Any]
) -> Iterator[tuple[nnx.Variable, list[Any]]]:
    """Return each variable with its arrays: its only one, or those of all its layers in order."""
    # The names of the layers of each stacked variable, by its id.
    stacked: dict[int, dict[int, str]] = {}
    for name, array in arrays.items():
        tensor = tensors[name]
        if isinstance(tensor, LayerSlice):
            layers = stacked.setdefault(id(tensor.variable), {})
            layers[tensor.layer] = name
        else:
            yield tensor, [array]
    for names in stacked.values():
        in_order = [arrays[names[layer]] for layer in range(len(names))]
        yield tensors[names[0]].variable, in_order
