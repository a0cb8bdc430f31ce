"""Pair what layers leave over: parameters of a user's own with those of layers, by their names.

A parameter of one module may be the weight of a layer of the other, or of all layers in a list:
`w_up` of shape `(e, i, o)` those of `experts.0.up` to `experts.7.up`.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from flax_attn.convert.match.matcher import Evidence, Matching
from flax_attn.convert.match.names import key_of
from flax_attn.convert.match.pairing import PairedTensor
from flax_attn.convert.match.tree import (
    NORMS,
    PARAMETER,
    STACKED,
    Group,
    Layer,
    Tensor,
    TensorPart,
)
from flax_attn.convert.rules import Shape, axes_of_side

# A matrix of heads that is one axis on the other side, as it lies before and after.
_WITH_HEADS = ("i n h -> (n h) i", "n i h -> (n h) i", "n h o -> o (n h)", "n h -> (n h)")
# Layers whose parameters are known to hold one weight each, in an order of axes that is known.
_PLAIN = {PARAMETER, "Linear", "Conv", "Embedding", "BatchNorm", *NORMS}
# The last part of a name that says no more than that it is a weight.
_WEIGHTS = {"weight", "weights", "kernel", "embedding"}
_BIASES = {"bias", "shift", "beta"}
# The letter by which many call a bias: in `b1`, `b_up` and `up_b`.
_BIAS = re.compile(r"(?<![a-zA-Z])b(?![a-zA-Z])")


@dataclass(frozen=True)
class _Item:
    """A tensor, or the tensors of all layers in a list.

    Args:
        name: its name; `*` takes the place of the number in a list.
        tensors: the tensor, or those of the list in order.
        is_own: whether it is a parameter of a user's own module, and not that of a layer.
        is_list: whether it is a list.
    """

    name: str
    tensors: tuple[Tensor, ...]
    is_own: bool = False
    is_list: bool = False

    @property
    def shape(self) -> Shape:
        """The shape of the tensor, or of all of a list stacked."""
        count = (len(self.tensors),) if self.is_list else ()
        return count + self.tensors[0].shape

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.tensors)


class LeftOver:
    """What a matching left over on both sides, as trees that can be matched by names.

    Args:
        found: the matching.
    """

    def __init__(self, found: Matching):
        ours = _tensors(found.ours)
        theirs = _tensors(found.theirs)
        our_items = _Items(ours, _stacks(theirs))
        their_items = _Items(theirs, _stacks(ours))
        self._items = our_items.by_name, their_items.by_name
        counted = our_items.counted | their_items.counted
        self.trees = our_items.tree(counted), their_items.tree(counted)

    def rows(self, found: Matching, choice: int | None = None) -> list[PairedTensor]:
        """Return a row for each pair of a matching of the trees.

        Args:
            found: the matching.
            choice: which of the patterns that fit is taken, such as whether a square matrix is
                transposed; None leaves out what several fit.
        """
        rows = []
        for ours, theirs, patterns, evidence in self._pairs(found):
            if len(patterns) == 1:
                rows.append(_row(ours, theirs, patterns[0], evidence))
            elif patterns and choice is not None:
                pattern = patterns[min(choice, len(patterns) - 1)]
                rows.append(_row(ours, theirs, pattern, "outputs"))
        return rows

    def choices(self, found: Matching) -> range:
        """Return the numbers of the choices of `rows`."""
        return range(max((len(patterns) for _, _, patterns, _ in self._pairs(found)), default=1))

    def problems(self, found: Matching) -> Iterator[str]:
        """Yield a line for each pair of a matching that several patterns fit."""
        for ours, theirs, patterns, _ in self._pairs(found):
            if len(patterns) > 1:
                ways = " or ".join(pattern or "as it is" for pattern in patterns)
                yield (
                    f"flax {ours.name} {ours.shape} may be torch {theirs.name} {theirs.shape} by"
                    f" {ways}"
                )

    def _pairs(self, found: Matching) -> Iterator[tuple[_Item, _Item, list[str], Evidence]]:
        """Yield what a matching pairs, with the patterns that fit and the evidence."""
        our_items, their_items = self._items
        for one, other, evidence in found.pairs:
            ours, theirs = our_items[_name(one)], their_items[_name(other)]
            if _may_be_one(ours, theirs, evidence):
                yield ours, theirs, _patterns(ours, theirs), evidence


class _Items:
    """The tensors of one side, those of lists together where the other side has them stacked."""

    def __init__(self, tensors: Mapping[Tensor, bool], stacked: set[Shape]):
        lists = _lists(tensors, stacked)
        in_lists = {tensor for item in lists for tensor in item.tensors}
        self.by_name: dict[str, _Item] = {item.name: item for item in lists}
        for tensor, is_own in tensors.items():
            if tensor not in in_lists:
                self.by_name[tensor.name] = _Item(tensor.name, (tensor,), is_own)
        self.counted = {_counted(item.shape) for item in lists}

    def tree(self, counted: set[Shape]) -> Group:
        """Return the items as layers of one parameter each; what is a list somewhere is counted."""
        layers = tuple(_layer(item, counted) for item in self.by_name.values())
        # Never paired by their order.
        return Group((), layers, ordered=False)


def _may_be_one(ours: _Item, theirs: _Item, evidence: Evidence) -> bool:
    """Whether two items may be the same parameter, though their layers are of two kinds."""
    if evidence == "shape" and _is_bias(ours) != _is_bias(theirs):
        return False
    is_stacked = ours.is_list or theirs.is_list
    return is_stacked or ours.is_own or theirs.is_own


def _is_bias(item: _Item) -> bool:
    """Whether something is a bias by its name."""
    words = key_of(_path(item.name)[-1:]).words
    return not _BIASES.isdisjoint(words)


def _name(layer: Layer) -> str:
    return layer.parts["value"].tensor.name


def _tensors(layers: Iterable[Layer]) -> dict[Tensor, bool]:
    """Return the tensors of some layers, each with whether it is a user's own parameter."""
    found = {}
    for layer in layers:
        if layer.kind.removeprefix(STACKED) in _PLAIN:
            whole = [part.tensor for part in layer.parts.values() if part.pieces == 1]
            found |= dict.fromkeys(whole, layer.kind == PARAMETER)
    return found


def _stacks(tensors: Iterable[Tensor]) -> set[Shape]:
    """Return what each tensor is if its first axis counts the layers in a list."""
    return {_counted(tensor.shape) for tensor in tensors if tensor.shape}


def _counted(shape: Shape) -> Shape:
    """Return the size of the first axis, and how many numbers are behind it."""
    return shape[0], prod(shape[1:])


def _lists(tensors: Iterable[Tensor], stacked: set[Shape]) -> list[_Item]:
    """Return the lists of tensors that the other side has stacked, the innermost lists first."""
    left = {tensor.name: tensor for tensor in tensors}
    depth = max((name.count(".") for name in left), default=0)
    found = []
    for behind in range(depth + 1):
        for name, own in _numbered(left.values(), behind).items():
            item = _Item(name, own, is_list=True)
            if _counted(item.shape) in stacked:
                found.append(item)
                for tensor in own:
                    del left[tensor.name]
    return found


def _numbered(tensors: Iterable[Tensor], behind: int) -> dict[str, tuple[Tensor, ...]]:
    """Return tensors whose names differ in a number alone, which has so many parts behind it."""
    alike: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for tensor in tensors:
        parts = tensor.name.split(".")
        at = len(parts) - 1 - behind
        if at >= 0 and parts[at].isdigit():
            number = int(parts[at])
            parts[at] = "*"
            alike[".".join(parts)][number] = tensor
    found = {}
    for name, own in alike.items():
        in_order = tuple(own[number] for number in sorted(own))
        complete = sorted(own) == list(range(len(own)))
        if complete and len({tensor.shape for tensor in in_order}) == 1:
            found[name] = in_order
    return found


def _layer(item: _Item, counted: set[Shape]) -> Layer:
    shape = item.shape
    is_counted = bool(shape) and _counted(shape) in counted
    # Sides differ in the order of their axes, and in which of them are one.
    sizes = _counted(shape) if is_counted else (prod(shape),)
    axes = " ".join(f"s{axis}" for axis in range(len(sizes)))
    part = TensorPart(Tensor(item.name, sizes), axes)
    kind = f"{STACKED}{PARAMETER}" if is_counted else PARAMETER
    return Layer(kind, _path(item.name), {"value": part})


def _path(name: str) -> tuple[str, ...]:
    """Return the path of a tensor, in words that both sides have.

    Example:
        >>> _path("moe.experts.*.up.weight"), _path("moe.b_up")
        (('moe', 'experts', 'up'), ('moe', 'bias_up'))
    """
    *parts, last = [part for part in name.split(".") if part != "*"]
    if not parts or last not in _WEIGHTS:
        parts.append(_BIAS.sub("bias", last))
    return tuple(parts)


def _patterns(ours: _Item, theirs: _Item) -> list[str]:
    """Return the patterns from an item to another one that their shapes allow.

    A weight that is called a kernel lies as those of Flax's layers do.
    """
    counts = ours.is_list or theirs.is_list
    shape, wanted = ours.shape[counts:], theirs.shape[counts:]
    fitting = [pattern for pattern in _ways(len(shape)) if _shape_after(pattern, shape) == wanted]
    is_kernel = fitting and ours.name.endswith("kernel")
    if shape == wanted and not is_kernel:
        fitting.append("")
    if theirs.is_list:
        return [pattern and _behind("e", "e", pattern) for pattern in fitting]
    if ours.is_list:
        # Parts with an axis of size 1 in front are joined along it.
        same = " ".join(_names_of_axes(len(shape)))
        return [_behind("", "1", pattern or f"{same} -> {same}") for pattern in fitting]
    return fitting


def _behind(left: str, right: str, pattern: str) -> str:
    """Return a pattern with an axis in front of each side."""
    ours, theirs = pattern.split(" -> ")
    return f"{left} {ours} -> {right} {theirs}".strip()


def _ways(rank: int) -> Iterator[str]:
    """Yield the patterns by which a weight may become that of another framework."""
    if rank > 1:
        axes = _names_of_axes(rank)
        *places, i, o = axes
        # As convolutions and linear layers have them, or with the last two axes transposed.
        for target in dict.fromkeys([(o, i, *places), (*places, o, i)]):
            yield f"{' '.join(axes)} -> {' '.join(target)}"
    yield from _WITH_HEADS


def _names_of_axes(rank: int) -> list[str]:
    last = ["i", "o"][-rank:] if rank else []
    return [f"s{axis}" for axis in range(rank - len(last))] + last


def _shape_after(pattern: str, shape: Shape) -> Shape | None:
    """Return the shape that a pattern makes of one; None if it has another number of axes."""
    left, right = map(axes_of_side, pattern.split(" -> "))
    if len(left) != len(shape):
        return None
    sizes = dict(zip(left, shape, strict=True))
    return tuple(prod(sizes[axis] for axis in side.strip("()").split()) for side in right)


def _row(ours: _Item, theirs: _Item, pattern: str, evidence: Evidence) -> PairedTensor:
    return PairedTensor(
        kind=PARAMETER,
        ours=ours.names,
        shapes=tuple(tensor.shape for tensor in ours.tensors),
        theirs=theirs.name,
        shape=theirs.shape,
        pattern=pattern,
        evidence=evidence,
        trainable=theirs.tensors[0].trainable,
    )
