"""Layers with variables stacked along a first axis, seen one by one, as layouts name them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx
from jax import Array

from flax_attn.convert.match.kinds import stacked_count
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


def numbered(path: tuple, outer: tuple, count: int) -> Iterator[tuple[tuple, int]]:
    """Yield the paths of a node in a module that is a list of layers, each with its layer.

    Example:
        >>> list(numbered(("blocks", "norm"), ("blocks",), 2))
        [(('blocks.0', 'norm'), 0), (('blocks.1', 'norm'), 1)]
    """
    *before, own = outer
    rest = path[len(outer) :]
    for layer in range(count):
        # In the place of the module, so that what follows keeps its own.
        yield (*before, f"{own}.{layer}", *rest), layer


def stacked_modules(modules: Mapping[tuple, nnx.Module]) -> dict[tuple, int]:
    """Return how many layers each module holds that `nnx.vmap` has made, by its path.

    A module that holds layers of Flax whose variables all have one axis too many, the first, is a
    list of layers. It is the outermost such module, and not the root.

    Args:
        modules: all modules of one, by their paths, as of `nnx.iter_modules`.
    """
    counts = _counts(modules)
    found: dict[tuple, int] = {}
    for path in sorted(counts, key=len):
        count = counts[path]
        if count and around(path, found) is None:
            outermost = _outermost(path, modules, count)
            found[outermost] = count
    return found


def _counts(modules: Mapping[tuple, nnx.Module]) -> dict[tuple, int | None]:
    """Return `count_stacked` by path."""
    # Our own models say by themselves how their layers are stacked.
    own = [path for path, one in modules.items() if stacked_layers(one)]
    counts = {}
    for path, one in modules.items():
        # The root has no name that its layers could be numbered under.
        if path and around(path, own) is None:
            counts[path] = count_stacked(one)
    return counts


def around(path: tuple, outer: Iterable[tuple]) -> tuple | None:
    """Return the path among some that another one begins with; None if it begins with none."""
    return next((one for one in outer if path[: len(one)] == one), None)


def _outermost(path: tuple, modules: Mapping[tuple, nnx.Module], count: int) -> tuple:
    """Return the path of the outermost module around a stacked layer that holds nothing else."""
    found = path
    for end in range(len(path) - 1, 0, -1):
        outer = path[:end]
        # A path through a list or mapping names no module.
        if outer not in modules:
            continue
        module = modules[outer]
        if not _are_all_stacked(module, count):
            break
        found = outer
    return found


def _are_all_stacked(module: nnx.Module, count: int) -> bool:
    for _, layer in nnx.iter_modules(module):
        if count_stacked(layer) not in (None, count):
            return False
    shapes = [_shape(variable) for _, variable in nnx.iter_graph(module) if _is_held(variable)]
    return all(shape and shape[0] == count for shape in shapes)


def _shape(variable: nnx.Variable) -> Shape:
    # A variable may hold what is no array.
    return getattr(variable, "shape", ())


def _is_held(node: Any) -> bool:
    return isinstance(node, nnx.Param | nnx.BatchStat)


def count_stacked(module: nnx.Module) -> int | None:
    """Return how many layers are stacked in a layer of Flax, 0 for one that is not stacked.

    It is None for other modules, whose variables may have any axes.
    """
    held = {name: _shape(value) for name, value in vars(module).items() if _is_held(value)}
    return stacked_count(module, held) if held else None


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
