"""Tensors as items that can be paired by name: alone, all of a list, or all that one may hold."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import NamedTuple

from flax_attn.convert.match.computed_weights import in_older_names
from flax_attn.convert.match.names import key_of
from flax_attn.convert.match.tree import (
    PARAMETER,
    STACKED,
    Group,
    Layer,
    Path,
    Tensor,
    TensorPart,
    simplify,
)
from flax_attn.convert.rules import Shape

# A layer with the parts of its name.
_Named = tuple[Path, Layer]
# What one projection may hold, in the order in which most do.
_FUSED = {
    "qkv": ("query", "key", "value"),
    "kv": ("key", "value"),
    "gate_up": ("gate", "up"),
}
_ROLES = set().union(*_FUSED.values())
# As Llama and T5 have them, without a word that tells.
_ROLES_BY_NAME = {"w1": "gate", "w3": "up", "wi_0": "gate", "wi_1": "up"}
# The last part of a name that says no more than that it is a weight, or a factor on one.
_GAINS = {"scale", "gamma", "gain", "g", "weight_g", "kernel_g"}
_WEIGHTS = {"weight", "weights", "w", "kernel", "embedding"} | _GAINS
# What a gain scales, in the weight norm of PyTorch and in ports of it.
_DIRECTION = "v"
_DIRECTIONS = {
    **dict.fromkeys(("weight_v", "kernel_v", "direction"), _DIRECTION),
    "weight_u": "u",
}
_BIASES = {"bias", "shift", "beta"}
# The letter by which many call a bias: in `b1`, `b_up`, `up_b` and `bq`.
_BIAS = re.compile(r"(?<![a-zA-Z])b(?![a-zA-Z])|^b(?=[qkvo]$)")


@dataclass(frozen=True)
class Item:
    """A tensor, the tensors of all layers in a list, or those that the other side has in one.

    Args:
        name: its name; `*` takes the place of the number in a list, and of the names of several.
        tensors: the tensor, or those of the list or of several in order.
        kind: kind of the layer that holds it.
        is_list: whether it is a list.
        fused: what the other side calls several in one, such as "qkv"; empty for others.
        labels: what takes the place of `*` in the name of each of several.
        has_gain: whether it is the weight of a module that has a gain for it as well.
    """

    name: str
    tensors: tuple[Tensor, ...]
    kind: str = ""
    is_list: bool = False
    fused: str = ""
    labels: tuple[str, ...] = ()
    has_gain: bool = False

    @property
    def shape(self) -> Shape:
        """The shape of the tensor, of all of a list stacked, or of PyTorch's several joined."""
        first = self.tensors[0].shape
        if self.is_list:
            return len(self.tensors), *first
        # The first axis of PyTorch's weights is that of the outputs.
        return (sum(self.widths), *first[1:]) if self.fused else first

    @property
    def is_own(self) -> bool:
        """Whether it is a parameter of a user's own module, and not that of a layer."""
        return self.kind == PARAMETER

    @property
    def widths(self) -> tuple[int, ...]:
        """The size of the first axis of each tensor."""
        return tuple(tensor.shape[0] for tensor in self.tensors)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.tensors)

    @property
    def key(self) -> str:
        """A name that no other item has."""
        return " + ".join(self.names) if self.fused else self.name

    @property
    def path(self) -> Path:
        """The path, in words that both sides have."""
        path = path_of(self._common_name)
        return (*path, _DIRECTION) if self.has_gain else path

    @property
    def parts(self) -> Path:
        """The parts of the name."""
        return _parts_of(self._common_name)

    @property
    def _common_name(self) -> str:
        """The name, with what several are in one for those of several."""
        if not self.fused:
            return in_older_names(self.name)
        is_bias = _BIAS.search(self.labels[0]) is not None
        return self.name.replace("*", f"bias {self.fused}" if is_bias else self.fused)

    @property
    def is_bias(self) -> bool:
        """Whether it is a bias by its name."""
        words = key_of(self.path[-1:]).words
        return not _BIASES.isdisjoint(words)

    def __str__(self) -> str:
        if not self.fused:
            return f"{self.name} {self.shape}"
        # They are often of one shape, which is said once.
        shapes = dict.fromkeys(tensor.shape for tensor in self.tensors)
        return f"{self.key} {' + '.join(map(str, shapes))}"


class _Place(NamedTuple):
    """Where the tensors of one projection stand: all that their names have in common."""

    name: str
    is_bias: bool
    axes: int


class _Projection(NamedTuple):
    """A tensor in a role, and the part of its name that says which."""

    tensor: Tensor
    label: str


_ByRole = dict[str, _Projection]


class Items:
    """The tensors of one side, those together that the other side has in one.

    Args:
        tensors: the tensors, each with the kind of its layer.
        others: those of the other side.
    """

    def __init__(self, tensors: Mapping[Tensor, str], others: Mapping[Tensor, str]):
        lists = _lists(tensors, _stacks(others))
        several = _fused(_without(tensors, lists), others)
        self.counted = {_counted(item.shape) for item in lists}
        left = _without(tensors, [*lists, *several])
        alone = [Item(tensor.name, (tensor,), tensors[tensor]) for tensor in left]
        self.by_key = {item.key: item for item in (*lists, *several, *_with_gains(alone))}

    def tree(self, counted: set[Shape]) -> Group:
        """Return the items as layers of one parameter each; what is a list somewhere is counted."""
        layers = [(item.parts, _layer(item, counted)) for item in self.by_key.values()]
        return simplify(_grouped(layers, ()))


def _grouped(layers: Iterable[_Named], path: Path) -> Group:
    """Return layers as those of nested modules, by the parts of their names behind a path."""
    inner = _by_first_parts(layers, len(path) + 1)
    children = chain.from_iterable(_children(*item) for item in inner.items())
    # Never paired by their order.
    return Group(path, tuple(children), ordered=False)


def _by_first_parts(layers: Iterable[_Named], count: int) -> dict[Path, list[_Named]]:
    found = defaultdict(list)
    for parts, layer in layers:
        found[parts[:count]].append((parts, layer))
    return found


def _children(path: Path, layers: Sequence[_Named]) -> Iterator[Layer | Group]:
    """Yield the layers whose name is a path, and a group of those that go on behind it."""
    yield from (layer for parts, layer in layers if parts == path)
    deeper = [named for named in layers if named[0] != path]
    if deeper:
        yield _grouped(deeper, path)


def _stacks(tensors: Iterable[Tensor]) -> set[Shape]:
    """Return what each tensor is if its first axis counts the layers in a list."""
    return {_counted(tensor.shape) for tensor in tensors if tensor.shape}


def _counted(shape: Shape) -> Shape:
    """Return the size of the first axis, and how many numbers are behind it."""
    return shape[0], prod(shape[1:])


def _lists(tensors: Iterable[Tensor], stacked: set[Shape]) -> list[Item]:
    """Return the lists of tensors that the other side has stacked, the innermost lists first."""
    found: list[Item] = []
    depth = max((tensor.name.count(".") for tensor in tensors), default=0)
    for behind in range(depth + 1):
        numbered = _numbered(_without(tensors, found), behind)
        found += [item for item in numbered if _counted(item.shape) in stacked]
    return found


def _without(tensors: Iterable[Tensor], items: Iterable[Item]) -> list[Tensor]:
    """Return the tensors that are in none of some items."""
    taken = {tensor for item in items for tensor in item.tensors}
    return [tensor for tensor in tensors if tensor not in taken]


def _numbered(tensors: Iterable[Tensor], behind: int) -> list[Item]:
    """Return the lists whose names differ in a number alone, with so many parts behind it."""
    alike: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for tensor in tensors:
        name, number = _with_star(tensor.name, behind)
        alike[name][number] = tensor
    complete = [(name, own) for name, own in alike.items() if _are_a_list(own)]
    return [Item(name, _in_order(own), is_list=True) for name, own in complete]


def _with_star(name: str, behind: int) -> tuple[str, int]:
    """Return a name with `*` for the number before so many parts, and the number; -1 is none."""
    parts = name.split(".")
    at = len(parts) - 1 - behind
    if at < 0 or not parts[at].isdigit():
        return name, -1
    return _star_at(parts, at), int(parts[at])


def _star_at(parts: Sequence[str], at: int) -> str:
    """Return a name with `*` in the place of a part."""
    return ".".join([*parts[:at], "*", *parts[at + 1 :]])


def _are_a_list(tensors: Mapping[int, Tensor]) -> bool:
    shapes = {tensor.shape for tensor in tensors.values()}
    return sorted(tensors) == list(range(len(tensors))) and len(shapes) == 1


def _in_order(tensors: Mapping[int, Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensors[number] for number in sorted(tensors))


def _fused(tensors: Sequence[Tensor], others: Iterable[Tensor]) -> list[Item]:
    """Return the projections that are one tensor on the other side, by how much that holds."""
    there = _by_role(others)
    sizes = _sizes_without(others, there)
    found: list[Item] = []
    for fused, roles in _FUSED.items():
        # Where the other side has them apart as well, they are paired one by one.
        if _complete(there, roles):
            continue
        places = _complete(_by_role(_without(tensors, found)), roles)
        items = [_item(place, own, fused) for place, own in places.items()]
        found += [item for item in items if _size(item) in sizes]
    return found


def _complete(places: Mapping[_Place, _ByRole], roles: Sequence[str]) -> dict[_Place, _ByRole]:
    """Return the places that have a projection in each role."""
    return {place: own for place, own in places.items() if set(roles) <= own.keys()}


def _sizes_without(tensors: Iterable[Tensor], places: Mapping[_Place, _ByRole]) -> set[int]:
    """Return how much each tensor holds that is in no role."""
    named = {one.tensor for own in places.values() for one in own.values()}
    return {prod(tensor.shape) for tensor in tensors if tensor not in named}


def _with_gains(items: Sequence[Item]) -> list[Item]:
    """Return items, those of modules that have a weight and a gain for it marked."""
    gains = {item.parts[:-1] for item in items if item.parts[-1] in _GAINS}
    weights = _WEIGHTS - _GAINS
    found = []
    for item in items:
        module = item.parts[:-1]
        is_weight = item.parts[-1] in weights
        has_gain = is_weight and module in gains
        found.append(replace(item, has_gain=has_gain))
    return found


def _item(place: _Place, own: _ByRole, fused: str) -> Item:
    projections = [own[role] for role in _FUSED[fused]]
    tensors = tuple(one.tensor for one in projections)
    labels = tuple(one.label for one in projections)
    return Item(place.name, tensors, fused=fused, labels=labels)


def _by_role(tensors: Iterable[Tensor]) -> dict[_Place, _ByRole]:
    """Return the projections of each module by role."""
    found: dict[_Place, _ByRole] = defaultdict(dict)
    for tensor in tensors:
        parts = tensor.name.split(".")
        at = _telling(parts)
        # A number by itself is no projection.
        if at is None or not tensor.shape:
            continue
        role, is_bias = _role(parts[at])
        place = _Place(_star_at(parts, at), is_bias, len(tensor.shape))
        found[place][role] = _Projection(tensor, parts[at])
    return found


def _telling(parts: Sequence[str]) -> int | None:
    """Return the last part of a name that says what its tensor projects to."""
    for at in reversed(range(len(parts))):
        role, _ = _role(parts[at])
        if role:
            return at
    return None


def _role(part: str) -> tuple[str, bool]:
    """Return what a part of a name says that a tensor projects to, and whether it is a bias."""
    if part in _ROLES_BY_NAME:
        return _ROLES_BY_NAME[part], False
    words = set(key_of((_BIAS.sub("bias ", part),)).words)
    roles = words - _WEIGHTS - _BIASES
    is_one = len(roles) == 1 and roles <= _ROLES
    return roles.pop() if is_one else "", not _BIASES.isdisjoint(words)


def _size(item: Item) -> int:
    return sum(prod(tensor.shape) for tensor in item.tensors)


def _layer(item: Item, counted: Collection[Shape]) -> Layer:
    kind, sizes = PARAMETER, (_size(item),)
    # Sides differ in the order of their axes, and in which of them are one.
    if not item.fused and item.shape and _counted(item.shape) in counted:
        kind, sizes = f"{STACKED}{PARAMETER}", _counted(item.shape)
    axes = " ".join(f"s{axis}" for axis in range(len(sizes)))
    value = TensorPart(Tensor(item.key, sizes), axes)
    return Layer(kind, item.path, {"value": value})


def _parts_of(name: str) -> Path:
    return tuple(part for part in name.split(".") if part != "*")


def path_of(name: str) -> Path:
    """Return the path of a tensor, in words that both sides have.

    Example:
        >>> path_of("moe.experts.*.up.weight"), path_of("moe.b_up")
        (('moe', 'experts', 'up'), ('moe', 'bias _up'))
    """
    *parts, last = _parts_of(name)
    if not parts or last not in _WEIGHTS:
        parts.append(_DIRECTIONS.get(last) or _BIAS.sub("bias ", last))
    return tuple(parts)
