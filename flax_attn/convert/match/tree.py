"""A model of any framework as a tree of layers, with the kind and the parameters of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from flax_attn.convert.rules import Shape

PARAMETER = "Parameter"  # the kind of a parameter that is an attribute of a user's module
NORMS = {
    "LayerNorm",
    "RMSNorm",
    "GroupNorm",
    "InstanceNorm",
    "Norm",
}  # "Norm" where the parameters do not tell which


class Tensor(NamedTuple):
    """A parameter or running statistic of a model."""

    name: str
    shape: Shape
    trainable: bool = True


@dataclass(frozen=True)
class Branch:
    """A module as it was built: its own tensors and its submodules, by attribute.

    Args:
        module: the module itself; None where only its parameters are known.
        ordered: whether the order of tensors and branches is that of construction.
    """

    module: object = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    branches: dict[str, Branch] = field(default_factory=dict)
    ordered: bool = True


@dataclass(frozen=True)
class Part:
    """A tensor, or a piece of one, in one role of a layer.

    Args:
        tensor: tensor that holds the part.
        axes: the axes of the part, as in einops: `"i o"`.
        merged: axes of the layer that consist of several of `axes`: `{"o": "(n h)"}`.
        piece: index of the part among `pieces` equal pieces of the tensor, along `axis`.
        pieces: number of pieces.
        axis: axis along which the tensor is cut.
    """

    tensor: Tensor
    axes: str
    merged: Mapping[str, str] = field(default_factory=dict)
    piece: int = 0
    pieces: int = 1
    axis: int = 0

    @property
    def shape(self) -> Shape:
        """The shape of the part."""
        shape = self.tensor.shape
        if self.pieces == 1:
            return shape
        return (*shape[: self.axis], shape[self.axis] // self.pieces, *shape[self.axis + 1 :])

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """The size of each axis of the layer."""
        sizes = {
            axis: size
            for axis, size in zip(self.axes.split(), self.shape, strict=True)
            if axis != "1"
        }
        for axis, names in self.merged.items():
            sizes[axis] = prod(sizes.pop(name) for name in names.strip("()").split())
        return tuple(sorted(sizes.items()))


@dataclass(frozen=True)
class Layer:
    """A layer of a known kind, or a parameter of its own: its parts by role."""

    kind: str
    path: tuple[str, ...]
    parts: dict[str, Part]

    @property
    def family(self) -> str:
        """The kind, one for all norms that have the same parameters."""
        return "norm" if self.kind in NORMS else self.kind

    def fits(self, other: Layer) -> bool:
        """Whether both can be the same layer."""
        return self.kind == other.kind or (
            self.family == other.family == "norm" and "Norm" in (self.kind, other.kind)
        )


@dataclass(frozen=True)
class Group:
    """A module that holds layers."""

    path: tuple[str, ...]
    children: tuple[Layer | Group, ...]
    ordered: bool = True


def layers_of(item: Layer | Group) -> Iterator[Layer]:
    """Iterate over the layers within."""
    if isinstance(item, Layer):
        yield item
        return
    for child in item.children:
        yield from layers_of(child)


def tensors_of(root: Group) -> dict[str, Tensor]:
    """Return the tensors of a tree by name."""
    return {
        part.tensor.name: part.tensor for layer in layers_of(root) for part in layer.parts.values()
    }


def simplify(root: Group) -> Group:
    """Return the tree with every tensor in one place, without empty groups and groups of one."""
    pruned = _prune(root, _owners(root))
    if isinstance(pruned, Group):
        return replace(pruned, path=())
    return Group((), () if pruned is None else (pruned,), root.ordered)


def _owners(root: Group) -> dict[tuple[str, int], tuple[str, ...]]:
    """Return the layer that each tensor counts for: of several, the embedding, else the first."""
    owners: dict[tuple[str, int], Layer] = {}
    for layer in layers_of(root):
        for part in layer.parts.values():
            owner = owners.setdefault((part.tensor.name, part.piece), layer)
            if layer.kind == "Embedding" and owner.kind != "Embedding":
                owners[part.tensor.name, part.piece] = layer
    return {key: layer.path for key, layer in owners.items()}


def _prune(
    item: Layer | Group, owners: dict[tuple[str, int], tuple[str, ...]]
) -> Layer | Group | None:
    if isinstance(item, Layer):
        own = {r: p for r, p in item.parts.items() if owners[p.tensor.name, p.piece] == item.path}
        return replace(item, parts=own) if own else None
    children = tuple(
        child for child in (_prune(child, owners) for child in item.children) if child is not None
    )
    if len(children) == 1:
        return children[0]
    return replace(item, children=children) if children else None
