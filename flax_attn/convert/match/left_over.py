"""Pair what layers leave over: parameters of a user's own with those of layers, by their names.

A parameter of one module may be the weight of a layer of the other, or of all layers in a list:
`w_up` of shape `(e, i, o)` those of `experts.0.up` to `experts.7.up`.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import NamedTuple

from flax_attn.convert.entry import axes_of_side
from flax_attn.convert.match.all_matchings import all_matchings
from flax_attn.convert.match.matcher import Evidence, Matching
from flax_attn.convert.match.names import key_of
from flax_attn.convert.match.pairing import PairedTensor
from flax_attn.convert.match.tree import (
    NORMS,
    PARAMETER,
    STACKED,
    Group,
    Layer,
    Path,
    Tensor,
    TensorPart,
    simplify,
)
from flax_attn.convert.rules import Rule, Shape

# A layer with the parts of its name.
_Named = tuple[Path, Layer]
# A matrix of heads that is one axis on the other side, as it lies before and after.
_WITH_HEADS = ("i n h -> (n h) i", "n i h -> (n h) i", "n h o -> o (n h)", "n h -> (n h)")
# Layers whose parameters are known to hold one weight each, in an order of axes that is known.
_PLAIN = {PARAMETER, "Linear", "Conv", "Embedding", "BatchNorm", *NORMS}
# The last part of a name that says no more than that it is a weight.
_WEIGHTS = {"weight", "weights", "w", "kernel", "embedding", "scale", "gamma", "gain", "g"}
_BIASES = {"bias", "shift", "beta"}
# The letter by which many call a bias: in `b1`, `b_up`, `up_b` and `bq`.
_BIAS = re.compile(r"(?<![a-zA-Z])b(?![a-zA-Z])|^b(?=[qkvo]$)")


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


class _Pair(NamedTuple):
    """Two items that belong together.

    Args:
        ours: item of the JAX side.
        theirs: item of the PyTorch side.
        evidence: evidence for the pair.
        patterns: patterns from ours to theirs that fit; `""` leaves it as it is.
    """

    ours: _Item
    theirs: _Item
    evidence: Evidence
    patterns: list[str]

    def row(self, choice: int | None) -> PairedTensor | None:
        """Return the row, with one of several patterns; None where none fits or is chosen."""
        is_open = bool(self.problem)
        if not self.patterns or (is_open and choice is None):
            return None
        at = min(choice or 0, len(self.patterns) - 1)
        evidence: Evidence = "outputs" if is_open else self.evidence
        return _row(self.ours, self.theirs, self.patterns[at], evidence)

    @property
    def problem(self) -> str:
        """What is not known of the pair; empty where all is, or where no pattern fits."""
        if len(self.patterns) > 1:
            ways = " or ".join(pattern or "as it is" for pattern in self.patterns)
            return f"{self._claim} by {ways}"
        is_told = self.evidence != "shape" or self._share_words()
        return "" if is_told else f"{self._claim}, but their names have no word in common"

    @property
    def _claim(self) -> str:
        ours = f"flax {self.ours.name} {self.ours.shape}"
        return f"{ours} may be torch {self.theirs.name} {self.theirs.shape}"

    def _share_words(self) -> bool:
        ours, theirs = _path(self.ours.name), _path(self.theirs.name)
        # Some words, such as "fc", say something only if both names are the same.
        return ours == theirs or not set(key_of(ours).words).isdisjoint(key_of(theirs).words)


class LeftOver:
    """What a matching left over on both sides, as trees that can be matched by names.

    Args:
        found: the matching.
    """

    def __init__(self, found: Matching):
        ours = _tensors(found.ours)
        theirs = _tensors(found.theirs)
        self._ours = _Items(ours, _stacks(theirs))
        self._theirs = _Items(theirs, _stacks(ours))

    @property
    def trees(self) -> tuple[Group, Group]:
        """Both sides."""
        counted = self._ours.counted | self._theirs.counted
        return self._ours.tree(counted), self._theirs.tree(counted)

    def rows(self, found: Matching, choice: int | None = None) -> list[PairedTensor]:
        """Return a row for each pair of a matching of the trees.

        Args:
            found: the matching.
            choice: which of the patterns that fit is taken, such as whether a square matrix is
                transposed; None leaves out pairs of which something is not known.
        """
        rows = [pair.row(choice) for pair in self._pairs(found)]
        return [row for row in rows if row is not None]

    def possible_rows(self) -> Iterator[list[PairedTensor]]:
        """Yield the rows of every matching of the trees, with each pattern that fits."""
        for found in all_matchings(*self.trees):
            counts = [len(pair.patterns) for pair in self._pairs(found)]
            for choice in range(max(counts, default=1)):
                yield self.rows(found, choice)

    def problems(self, found: Matching) -> Iterator[str]:
        """Yield a line for each pair of a matching of which something is not known."""
        return (pair.problem for pair in self._pairs(found) if pair.patterns and pair.problem)

    def _pairs(self, found: Matching) -> Iterator[_Pair]:
        """Yield what a matching pairs."""
        for one, other, evidence in found.pairs:
            ours = self._ours.by_name[_name(one)]
            theirs = self._theirs.by_name[_name(other)]
            if _may_be_one(ours, theirs, evidence):
                yield _Pair(ours, theirs, evidence, _patterns(ours, theirs))


class _Items:
    """The tensors of one side, those of lists together where the other side has them stacked."""

    def __init__(self, tensors: Mapping[Tensor, bool], stacked: set[Shape]):
        lists = _lists(tensors, stacked)
        self.counted = {_counted(item.shape) for item in lists}
        left = _without(tensors, lists)
        alone = [_Item(tensor.name, (tensor,), tensors[tensor]) for tensor in left]
        self.by_name = {item.name: item for item in (*lists, *alone)}

    def tree(self, counted: set[Shape]) -> Group:
        """Return the items as layers of one parameter each; what is a list somewhere is counted."""
        layers = [(_parts(item.name), _layer(item, counted)) for item in self.by_name.values()]
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
    found: list[_Item] = []
    depth = max((tensor.name.count(".") for tensor in tensors), default=0)
    for behind in range(depth + 1):
        numbered = _numbered(_without(tensors, found), behind)
        found += [item for item in numbered if _counted(item.shape) in stacked]
    return found


def _without(tensors: Iterable[Tensor], lists: Iterable[_Item]) -> list[Tensor]:
    """Return the tensors that are in none of some lists."""
    taken = {tensor for item in lists for tensor in item.tensors}
    return [tensor for tensor in tensors if tensor not in taken]


def _numbered(tensors: Iterable[Tensor], behind: int) -> list[_Item]:
    """Return the lists whose names differ in a number alone, with so many parts behind it."""
    alike: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for tensor in tensors:
        name, number = _with_star(tensor.name, behind)
        alike[name][number] = tensor
    complete = [(name, own) for name, own in alike.items() if _are_a_list(own)]
    return [_Item(name, _in_order(own), is_list=True) for name, own in complete]


def _with_star(name: str, behind: int) -> tuple[str, int]:
    """Return a name with `*` for the number before so many parts, and the number; -1 is none."""
    parts = name.split(".")
    at = len(parts) - 1 - behind
    if at < 0 or not parts[at].isdigit():
        return name, -1
    return ".".join([*parts[:at], "*", *parts[at + 1 :]]), int(parts[at])


def _are_a_list(tensors: Mapping[int, Tensor]) -> bool:
    shapes = {tensor.shape for tensor in tensors.values()}
    return sorted(tensors) == list(range(len(tensors))) and len(shapes) == 1


def _in_order(tensors: Mapping[int, Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensors[number] for number in sorted(tensors))


def _layer(item: _Item, counted: set[Shape]) -> Layer:
    kind, sizes = PARAMETER, (prod(item.shape),)
    # Sides differ in the order of their axes, and in which of them are one.
    if item.shape and _counted(item.shape) in counted:
        kind, sizes = f"{STACKED}{PARAMETER}", _counted(item.shape)
    axes = " ".join(f"s{axis}" for axis in range(len(sizes)))
    value = TensorPart(Tensor(item.name, sizes), axes)
    return Layer(kind, _path(item.name), {"value": value})


def _parts(name: str) -> Path:
    return tuple(part for part in name.split(".") if part != "*")


def _path(name: str) -> Path:
    """Return the path of a tensor, in words that both sides have.

    Example:
        >>> _path("moe.experts.*.up.weight"), _path("moe.b_up")
        (('moe', 'experts', 'up'), ('moe', 'bias _up'))
    """
    *parts, last = _parts(name)
    if not parts or last not in _WEIGHTS:
        parts.append(_BIAS.sub("bias ", last))
    return tuple(parts)


def _patterns(ours: _Item, theirs: _Item) -> list[str]:
    """Return the patterns from an item to another one that their shapes allow."""
    counts = ours.is_list or theirs.is_list
    shape = ours.shape[counts:]
    fitting = _fitting(shape, theirs.shape[counts:], ours.name.endswith("kernel"))
    if theirs.is_list:
        return [pattern and _behind("e", "e", pattern) for pattern in fitting]
    if ours.is_list:
        return [_of_parts(pattern, len(shape)) for pattern in fitting]
    return fitting


def _fitting(shape: Shape, wanted: Shape, is_kernel: bool) -> list[str]:
    """Return the patterns from a shape to another one; a kernel lies as those of Flax do."""
    fitting = [pattern for pattern in _ways(len(shape)) if _shape_after(pattern, shape) == wanted]
    if shape == wanted and not (is_kernel and fitting):
        fitting.append("")
    return fitting


def _of_parts(pattern: str, rank: int) -> str:
    """Return a pattern for parts that are joined along an axis of size 1 in front."""
    same = " ".join(_names_of_axes(rank))
    return _behind("", "1", pattern or f"{same} -> {same}")


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
        rule=Rule(ours.names, theirs.name, pattern),
        shapes=tuple(tensor.shape for tensor in ours.tensors),
        shape=theirs.shape,
        evidence=evidence,
        trainable=theirs.tensors[0].trainable,
    )
