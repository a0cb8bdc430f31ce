"""Which value of one run is which of the other: by their numbers, whatever their layout is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from types import MappingProxyType

import numpy as np

from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.trace.layouts import laid_out
from flax_attn.parity.trace.program import Node, Program

# Relative to the size of an array: far below any difference that matters, and above the rounding of
# a deep network in float64.
SAME = 1e-11
# A number this large hides a score, as infinity does.
HIDING = 1e8
# A moment of n rounded numbers is that exact.
CLOSE = 1e-9
# The layouts of an array that are tried.
LAYOUTS = 24
# The sorted numbers that are kept: 256 MiB.
ROOM = 2**25


class Sorted:
    """Sorted numbers of arrays: those that were used last are kept, the others sorted again.

    Args:
        room: largest count of numbers that are kept; those of one array are kept whatever it is.
    """

    def __init__(self, room: int = ROOM):
        self.room = room
        self.size = 0
        self._kept: dict[Numbers, np.ndarray] = {}

    def of(self, numbers: Numbers) -> np.ndarray:
        """Return the numbers of an array that hide nothing, in order."""
        found = self._kept.pop(numbers, None)
        if found is None:
            found = np.sort(_shown(numbers.array))
            self.size += found.size
        # The last of the keys is the one that was used last.
        self._kept[numbers] = found
        while self.size > self.room and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            self.size -= self._kept.pop(oldest).size
        return found


def _shown(array: np.ndarray) -> np.ndarray:
    """Return the numbers of an array that hide nothing."""
    flat = _flat(array)
    with np.errstate(invalid="ignore"):
        return flat[np.abs(flat) < HIDING]


@dataclass(eq=False)
class Numbers:
    """The numbers of an array without their order.

    Args:
        array: any array.
        kept: where its sorted numbers are kept.
    """

    array: np.ndarray
    kept: Sorted = field(default_factory=Sorted)

    @property
    def sorted(self) -> np.ndarray:
        """The numbers that hide nothing, in order."""
        return self.kept.of(self)

    @cached_property
    def scale(self) -> float:
        """The mean absolute value."""
        shown = _shown(self.array)
        return float(np.abs(shown).mean()) if shown.size else 0.0

    @cached_property
    def features(self) -> np.ndarray:
        """Moments that do not change if all numbers are repeated equally often."""
        x = self.sorted
        if not x.size or not self.scale:
            return np.zeros(5)
        unit = x / self.scale
        hidden = 1 - x.size / max(self.array.size, 1)
        cubes = (unit**3).mean()
        return np.array([self.scale, unit.mean(), (unit**2).mean(), cubes, hidden])

    @cached_property
    def telling(self) -> bool:
        """Whether equal numbers are the same quantity: they are many, or at least not all alike."""
        x = self.sorted
        if self.array.dtype.kind not in "fc" or not x.size:
            return False
        # A number of many digits is not the same by chance.
        if x.size == 1:
            return bool(float(f"{x[0]:.6g}") != x[0])
        distinct = 1 + np.count_nonzero(np.diff(x) > SAME * (self.scale or 1))
        return bool(distinct > 4 or (distinct > 1 and distinct == x.size))

    def equals(self, other: Numbers) -> bool:
        """Whether both hold the same numbers, each perhaps repeated."""
        if not np.allclose(self.features, other.features, rtol=CLOSE, atol=CLOSE):
            return False
        few, many = sorted((self.sorted, other.sorted), key=len)
        if not len(few) or len(many) % len(few):
            return not len(many)
        every = many[:: len(many) // len(few)]
        return bool((np.abs(every - few) <= SAME * max(self.scale, other.scale)).all())


def same_array(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays hold the same numbers at the same places, except for axes of size 1."""
    if one.size != other.size:
        return False
    first, second = np.squeeze(one), np.squeeze(other)
    if first.shape != second.shape:
        return False
    if first.dtype.kind not in "fc":
        return bool((first == second).all())
    scale = max(Numbers(first).scale, Numbers(second).scale)
    return _close(first, second, scale)


def is_laid_out(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether an array is another in a layout; where one repeats numbers, no order is known."""
    if ours.size != theirs.size:
        return True
    layouts = islice(laid_out(theirs, ours.shape), LAYOUTS)
    return any(same_array(ours, value) for value in layouts)


def _close(first: np.ndarray, second: np.ndarray, scale: float) -> bool:
    with np.errstate(invalid="ignore"):
        hidden = (np.abs(first) >= HIDING) | ~np.isfinite(first)
        other_hidden = (np.abs(second) >= HIDING) | ~np.isfinite(second)
        if (hidden != other_hidden).any():
            return False
        apart = np.abs(np.where(hidden, 0, first) - np.where(hidden, 0, second))
    return bool((apart <= SAME * max(scale, 1e-300)).all())


@dataclass
class Alignment:
    """The values that both runs have.

    Args:
        flax: run of JAX.
        torch: run of PyTorch.
        expected: the right outputs of the JAX run, by name.
        changed: values of the JAX run that replace those that it computed.
        fixed: nodes of JAX whose values were taken from PyTorch, and stay.
        ordered: whether numbers in another order are another quantity, except for a layout of axes.
    """

    flax: Program
    torch: Program
    expected: Arrays
    changed: Mapping[Node, np.ndarray] = field(default_factory=dict)
    fixed: frozenset[Node] = frozenset()
    ordered: bool = False

    def __post_init__(self):
        self._numbers: dict[Node, Numbers] = {}
        self.kept = Sorted(ROOM)

    def value(self, node: Node) -> np.ndarray:
        """Return the value of a node, after what replaces it."""
        return self.changed.get(node, node.value)

    def numbers(self, node: Node) -> Numbers:
        """Return the numbers of a node, after what replaces them."""
        if node not in self._numbers:
            self._numbers[node] = Numbers(self.value(node), self.kept)
        return self._numbers[node]

    @cached_property
    def _index(self) -> tuple[np.ndarray, list[Node]]:
        telling = [node for node in self.torch.nodes if self.numbers(node).telling]
        telling.sort(key=lambda node: self.numbers(node).scale)
        return np.array([self.numbers(node).scale for node in telling]), telling

    @cached_property
    def _exact(self) -> dict[bytes, list[Node]]:
        """The PyTorch nodes whose numbers tell little, by their array."""
        found: dict[bytes, list[Node]] = {}
        for node in self.torch.nodes:
            if not self.numbers(node).telling:
                found.setdefault(_bytes(node.value), []).append(node)
        return found

    @cached_property
    def torch_of(self) -> dict[Node, list[Node]]:
        """The PyTorch nodes that hold the numbers of each JAX node that has any."""
        return {node: found for node in self.flax.nodes if (found := self.matches(node))}

    @cached_property
    def flax_of(self) -> dict[Node, list[Node]]:
        """The JAX nodes that hold the numbers of each PyTorch node that has any."""
        found: dict[Node, list[Node]] = {}
        for node, others in self.torch_of.items():
            for other in others:
                found.setdefault(other, []).append(node)
        return found

    @cached_property
    def quantities(self) -> dict[Node, int]:
        """The number of the quantity that each node of either side is, if both sides have it.

        It is the position of the first node of PyTorch that holds it.
        """
        found: dict[Node, int] = {}
        for node, others in self.flax_of.items():
            same = [other.order for one in others for other in self.torch_of[one]]
            found[node] = min(same)
        ours = {node: found[others[0]] for node, others in self.torch_of.items()}
        return found | ours

    def matches(self, node: Node) -> list[Node]:
        """Return the PyTorch nodes that hold the numbers of a JAX node."""
        own = self.numbers(node)
        found = self._telling(own)
        return found if found or own.telling else self._exact.get(_bytes(own.array), [])

    def matches_array(self, value: np.ndarray) -> list[Node]:
        """Return the PyTorch nodes that hold the numbers of an array, if these tell anything."""
        return self._telling(Numbers(value))

    def _telling(self, own: Numbers) -> list[Node]:
        scales, nodes = self._index
        low = np.searchsorted(scales, own.scale * (1 - CLOSE))
        high = np.searchsorted(scales, own.scale * (1 + CLOSE), side="right")
        # Most values are none of the other side's by their size alone.
        if low == high or not own.telling:
            return []
        found = [node for node in nodes[low:high] if own.equals(self.numbers(node))]
        if self.ordered:
            found = [node for node in found if is_laid_out(own.array, node.value)]
        return sorted(found, key=lambda node: node.order)

    def rerun(
        self,
        replaced: Mapping[Node, np.ndarray],
        most: int | None = None,
        until: Node | None = None,
    ) -> dict[Node, np.ndarray]:
        """Return the values of JAX that change when some are replaced, as `Program.rerun` does."""
        return self.flax.rerun(replaced, self.changed, most, until, self.fixed)

    def wrong(self, changed: Mapping[Node, np.ndarray] = MappingProxyType({})) -> list[str]:
        """Return the names of the outputs that differ, with changed values if there are any."""
        found = []
        for name, node in self.flax.outputs.items():
            if not same_array(changed.get(node, self.value(node)), self.expected[name]):
                found.append(name)
        return found

    def with_changed(
        self, changed: Mapping[Node, np.ndarray], fixed: Iterable[Node] = ()
    ) -> Alignment:
        """Return the alignment after some values of the JAX run are replaced.

        Args:
            changed: every value that changes.
            fixed: nodes whose values were replaced, which later replacements leave as they are.
        """
        values = {**self.changed, **changed}
        stays = self.fixed | frozenset(fixed)
        other = replace(self, changed=values, fixed=stays)
        kept = {node: own for node, own in self._numbers.items() if node not in changed}
        other._numbers, other.kept = kept, self.kept
        other.__dict__["_index"] = self._index
        other.__dict__["_exact"] = self._exact
        known = self.torch_of
        found = {}
        for node in self.flax.nodes:
            matched = other.matches(node) if node in changed else known.get(node)
            if matched:
                found[node] = matched
        other.__dict__["torch_of"] = found
        return other


@dataclass(frozen=True)
class Repair:
    """A value of the JAX run that is computed differently in PyTorch.

    Args:
        flax: node of the JAX run.
        torch: node of the PyTorch run that is the same quantity.
        before: the alignment before it was replaced.
        value: value of PyTorch in the layout of the node of the JAX run.
    """

    flax: Node
    torch: Node
    before: Alignment
    value: np.ndarray


def _flat(array: np.ndarray) -> np.ndarray:
    """Return the numbers of an array, of complex ones the real and the imaginary parts."""
    if np.iscomplexobj(array):
        array = np.stack([np.real(array), np.imag(array)])
    return np.asarray(array, np.float64).reshape(-1)


def _bytes(array: np.ndarray) -> bytes:
    flat = _flat(array)
    # Numbers that are all alike say nothing but their shape.
    alike = not flat.size or (flat == flat[0]).all()
    shape = str(np.squeeze(array).shape) if alike else ""
    return shape.encode() + flat.tobytes()


def cone(outputs: Iterable[Node], matched: Mapping[Node, Sequence[Node]]) -> list[Node]:
    """Return the unmatched nodes that lead to outputs, in order."""
    found: set[Node] = set()
    waiting = [node for node in outputs if node not in matched]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.add(node)
        waiting += [operand for operand in node.operands if operand not in matched]
    return sorted(found, key=lambda node: node.order)
