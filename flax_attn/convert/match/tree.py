"""A model of any framework as a tree of layers, with the kind and the parameters of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from flax_attn.convert.rules import Shape

# The kind of a parameter that is an attribute of a user's module.
PARAMETER = "Parameter"
# Before the kind of a layer whose parameters are stacked along a first axis.
STACKED = "stacked "
# The last is that of a norm whose parameters do not tell which it is.
NORMS = {"LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm", "Norm"}
# Layers of PyTorch whose weights may be read as those of linear layers.
RECURRENT = {"RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell"}
# The attributes from the root of a model to what it holds.
Path = tuple[str, ...]
# A tensor by name, and the piece of it.
Piece = tuple[str, int]


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
class TensorPart:
    """A tensor, or a piece of one, in one role of a layer.

    Args:
        tensor: tensor that holds the part.
        axes: the axes of the part, as in einops: `"i o"`.
        merged: axes of the layer that consist of several of `axes`: `{"o": "(n h)"}`.
        piece: index of the part among `pieces` equal pieces of the tensor, along `axis`.
        pieces: number of pieces.
        axis: axis along which the tensor is cut.
        flipped: axes that PyTorch has from the other end.
    """

    tensor: Tensor
    axes: str
    merged: Mapping[str, str] = field(default_factory=dict)
    piece: int = 0
    pieces: int = 1
    axis: int = 0
    flipped: tuple[str, ...] = ()

    @property
    def shape(self) -> Shape:
        """The shape of the part."""
        shape = list(self.tensor.shape)
        if self.pieces > 1:
            shape[self.axis] //= self.pieces
        return tuple(shape)

    @property
    def key(self) -> Piece:
        """The tensor and the piece of it, which one layer of a model owns."""
        return self.tensor.name, self.piece

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """The size of each axis of the layer."""
        sizes = dict(zip(self.axes.split(), self.shape, strict=True))
        # Axes of size 1 do not count: frameworks differ in them.
        sizes.pop("1", None)
        for axis, names in self.merged.items():
            merged = names.strip("()").split()
            sizes[axis] = prod(sizes.pop(name) for name in merged)
        return tuple(sorted(sizes.items()))


@dataclass(frozen=True)
class Layer:
    """A layer of a known kind, or a parameter of its own: its parts by role."""

    kind: str
    path: Path
    parts: dict[str, TensorPart]

    @property
    def family(self) -> str:
        """The kind, one for all norms that have the same parameters, and for linear layers."""
        if self.kind in RECURRENT and "value" not in self.parts:
            return "Linear"
        return "norm" if self.kind in NORMS else self.kind

    def fits(self, other: Layer) -> bool:
        """Whether both can be the same layer."""
        if self.family == "norm" and self.kind != other.kind:
            return other.family == "norm" and "Norm" in (self.kind, other.kind)
        return self.family == other.family


@dataclass(frozen=True)
class Group:
    """A module that holds layers."""

    path: Path
    children: tuple[Layer | Group, ...]
    ordered: bool = True


def layers_of(item: Layer | Group) -> Iterator[Layer]:
    """Iterate over the layers within."""
    if isinstance(item, Layer):
        yield item
        return
    for child in item.children:
        yield from layers_of(child)


def pointwise_as_linear(root: Group) -> Group:
    """Return the tree with each convolution whose kernel covers one place as a linear layer."""
    return replace(root, children=tuple(map(_as_linear, root.children)))


def _as_linear(item: Layer | Group) -> Layer | Group:
    if isinstance(item, Group):
        return pointwise_as_linear(item)
    parts = item.parts
    if item.kind != "Conv" or not all(map(_covers_one_place, parts.values())):
        return item
    flat = {role: _without_places(part) for role, part in parts.items()}
    return Layer("Linear", item.path, flat)


def _covers_one_place(part: TensorPart) -> bool:
    sizes = zip(part.axes.split(), part.shape, strict=True)
    return all(size == 1 for axis, size in sizes if axis not in ("i", "o"))


def _without_places(part: TensorPart) -> TensorPart:
    axes = [axis if axis in ("i", "o") else "1" for axis in part.axes.split()]
    return replace(part, axes=" ".join(axes))


def tensors_of(root: Group) -> dict[str, Tensor]:
    """Return the tensors of a tree by name."""
    found = {}
    for layer in layers_of(root):
        found |= {part.tensor.name: part.tensor for part in layer.parts.values()}
    return found


def simplify(root: Group) -> Group:
    """Return the tree with every tensor in one place, without empty groups and groups of one."""
    pruned = _prune(root, _owners(root))
    if isinstance(pruned, Group):
        return replace(pruned, path=())
    return Group((), () if pruned is None else (pruned,), root.ordered)


def _owners(root: Group) -> dict[Piece, Path]:
    """Return the layer that each tensor counts for: of several, the embedding, else the first."""
    # An output layer may share its weight with the embedding, and come before it.
    layers = sorted(layers_of(root), key=lambda layer: layer.kind != "Embedding")
    owners: dict[Piece, Path] = {}
    for layer in layers:
        for part in layer.parts.values():
            owners.setdefault(part.key, layer.path)
    return owners


def _prune(item: Layer | Group, owners: dict[Piece, Path]) -> Layer | Group | None:
    if isinstance(item, Layer):
        return _prune_layer(item, owners)
    children = []
    for child in item.children:
        pruned = _prune(child, owners)
        if pruned is not None:
            children.append(pruned)
    if len(children) == 1:
        return children[0]
    return replace(item, children=tuple(children)) if children else None


def _prune_layer(layer: Layer, owners: dict[Piece, Path]) -> Layer | None:
    own = {role: part for role, part in layer.parts.items() if owners[part.key] == layer.path}
    return replace(layer, parts=own) if own else None
