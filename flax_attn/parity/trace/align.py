"""Which value of one run is which of the other: by their numbers, whatever their layout is."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np

from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.trace.numbers import (
    CLOSE,
    ROOM,
    Numbers,
    Sorted,
    flattened,
    is_laid_out,
    same_array,
)
from flax_attn.parity.trace.program import Node, Program

Values = Mapping[Node, np.ndarray]
# The values that all searches between two runs may compute again: about 20 seconds of small ones.
VALUES = 400_000


class Budget:
    """How many values searches may compute again, so that each ends after about as long.

    Args:
        left: number of values.
    """

    def __init__(self, left: int):
        self.left = left
        self._reserved = 0

    def begin(self) -> None:
        """Give the search that begins half of what is left."""
        self._reserved = self.left // 2

    def spend(self, count: int) -> None:
        """Note that so many values were computed."""
        self.left -= count

    @property
    def spent(self) -> bool:
        """Whether this search has to end."""
        return self.left <= self._reserved


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
        budget: how many values may be computed again, shared by all alignments of two runs.
    """

    flax: Program
    torch: Program
    expected: Arrays
    changed: Values = field(default_factory=dict)
    fixed: frozenset[Node] = frozenset()
    ordered: bool = False
    budget: Budget = field(default_factory=lambda: Budget(VALUES))

    def __post_init__(self):
        self._numbers: dict[Node, Numbers] = {}
        self._computed_alike: dict[Node, list[Node]] = {}
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
        """The PyTorch nodes whose numbers tell what they are, by size, and their sizes."""
        # Sorted, so that those of one size are found by bisection.
        telling = [node for node in self.torch.nodes if self.numbers(node).telling]
        telling.sort(key=lambda node: self.numbers(node).scale)
        scales = [self.numbers(node).scale for node in telling]
        return np.array(scales), telling

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
            found[node] = min(same.order for other in others for same in self.torch_of[other])
        ours = {node: found[others[0]] for node, others in self.torch_of.items()}
        return found | ours

    def matches(self, node: Node) -> list[Node]:
        """Return the PyTorch nodes that hold the numbers of a JAX node."""
        own = self.numbers(node)
        if own.telling:
            return self._telling(own)
        # Few numbers are equal by chance in some order: only the same array is the same quantity.
        alike = self._exact.get(_bytes(own.array), [])
        if not alike or node not in self.flax.varying or not _is_one_number(flattened(own.array)):
            return alike
        if node not in self._computed_alike:
            found = [other for other in alike if self._have_common_operands(node, other)]
            self._computed_alike[node] = found
        return self._computed_alike[node]

    def _have_common_operands(self, node: Node, other: Node) -> bool:
        """Whether a node of PyTorch is computed with the values that one of JAX is.

        A gate times a state that begins with zeros is another quantity than another gate times it.
        """
        for operand in node.operands:
            computed = operand.floating and operand in self.flax.varying
            if computed and not set(other.operands).intersection(self.matches(operand)):
                return False
        return True

    def matches_array(self, value: np.ndarray) -> list[Node]:
        """Return the PyTorch nodes that hold the numbers of an array, if these tell anything."""
        return self._telling(Numbers(value))

    def _telling(self, own: Numbers) -> list[Node]:
        scales, nodes = self._index
        low = np.searchsorted(scales, own.scale * (1 - CLOSE))
        high = np.searchsorted(scales, own.scale * (1 + CLOSE), side="right")
        near = nodes[low:high]
        # Most values are none of the other side's by their size alone.
        if not near or not own.telling:
            return []
        found = [node for node in near if own.equals(self.numbers(node))]
        if self.ordered:
            found = [node for node in found if is_laid_out(own.array, node.value)]
        found.sort(key=lambda node: node.order)
        return found

    def rerun(
        self, replaced: Values, most: int | None = None, until: Node | None = None
    ) -> dict[Node, np.ndarray]:
        """Return the values of JAX that change when some are replaced, as `Program.rerun` does."""
        changed = self.flax.rerun(replaced, self.changed, most, until, self.fixed)
        self.budget.spend(len(changed))
        return changed

    def wrong(self, changed: Values = MappingProxyType({})) -> list[str]:
        """Return the names of the outputs that differ, with changed values if there are any."""
        found = []
        for name, node in self.flax.outputs.items():
            value = changed.get(node, self.value(node))
            if not same_array(value, self.expected[name]):
                found.append(name)
        return found

    def with_changed(self, changed: Values, fixed: Iterable[Node] = ()) -> Alignment:
        """Return the alignment after some values of the JAX run are replaced.

        Args:
            changed: every value that changes.
            fixed: nodes whose values were replaced, which later replacements leave as they are.
        """
        values = {**self.changed, **changed}
        other = replace(self, changed=values, fixed=self.fixed.union(fixed))
        # PyTorch's values stay, and so do the matches of what does not change.
        other._index = self._index
        other._exact = self._exact
        other.kept = self.kept
        other._numbers = {node: own for node, own in self._numbers.items() if node not in changed}
        computed = self._computed_alike.items()
        other._computed_alike = {node: own for node, own in computed if node not in changed}
        known = self.torch_of
        torch_of = {}
        for node in self.flax.nodes:
            matched = other.matches(node) if node in changed else known.get(node)
            if matched:
                torch_of[node] = matched
        other.torch_of = torch_of
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


def _bytes(array: np.ndarray) -> bytes:
    flat = flattened(array)
    # Numbers that are all alike say nothing but their shape.
    shape = str(np.squeeze(array).shape) if _is_one_number(flat) else ""
    return shape.encode() + flat.tobytes()


def _is_one_number(flat: np.ndarray) -> bool:
    return not flat.size or bool((flat == flat[0]).all())


def cone(outputs: Iterable[Node], matched: Container[Node]) -> list[Node]:
    """Return the nodes that lead to outputs, in order, without matched ones and what is before."""
    found: set[Node] = set()
    waiting = list(outputs)
    while waiting:
        node = waiting.pop()
        if node in matched or node in found:
            continue
        found.add(node)
        waiting += node.operands
    return sorted(found, key=lambda node: node.order)
