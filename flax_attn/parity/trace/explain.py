"""Hypotheses about what differs between the nodes that a search found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product

import numpy as np

from flax_attn.parity.trace.align import Alignment, Repair, cone
from flax_attn.parity.trace.apart import (
    few_apart,
    layouts_of,
    rounded_apart,
    rounded_by,
    times_apart,
)
from flax_attn.parity.trace.axes import Along, axes_of, in_layout_of, innermost
from flax_attn.parity.trace.builder import Builder
from flax_attn.parity.trace.candidates import beyond_layout
from flax_attn.parity.trace.choices import both_hide, without_hiding
from flax_attn.parity.trace.expression import Expression, parts
from flax_attn.parity.trace.gaps import Gap, gaps
from flax_attn.parity.trace.hypothesis import Hypothesis, Side, grouped_by_kind, places
from flax_attn.parity.trace.moves import last_move, narrowed, relation, shown, steps, turns
from flax_attn.parity.trace.notation import Names, plain, text, whole
from flax_attn.parity.trace.numbers import HIDING, same_array
from flax_attn.parity.trace.patterns import moved_from
from flax_attn.parity.trace.program import Node
from flax_attn.parity.trace.quantities import in_order

# What differs as a whole.
WHOLE = ("operation", "operand", "order", "term", "base")
# More gaps than these are not told apart: the whole expressions say what differs. Those of repeated
# steps are one.
FEW, MANY = 4, 48
# The layouts that are tried of several values that differ.
COMBINED = 9


def explain(repair: Repair) -> list[Hypothesis]:
    """Return what differs at a node that was replaced."""
    return list(_Explained(repair).hypotheses())


def parted(alignment: Alignment, wrong: Sequence[str]) -> list[Hypothesis]:
    """Return what differs where the programs part, if no value of one fits into the other.

    Args:
        alignment: values that both runs have.
        wrong: names of the outputs that differ.
    """
    flax_outputs = [alignment.flax.outputs[name] for name in wrong]
    torch_outputs = [alignment.torch.outputs[name] for name in wrong]
    ours = cone(flax_outputs, alignment.torch_of)
    theirs = cone(torch_outputs, alignment.flax_of)
    found = []
    for flax, torch in product(_first_of(ours), _first_of(theirs)):
        if flax.operation == torch.operation:
            found += _side_by_side(alignment, flax, torch).same_operands()
    for flax, torch in zip(flax_outputs, torch_outputs, strict=True):
        # Numbers that both have throughout are moved on the way.
        if torch in alignment.torch_of.get(flax, ()):
            explained = _side_by_side(alignment, flax, torch)
            found.append(explained.moved(flax, torch, turns(flax), turns(torch)))
    return found[:FEW]


def exchanged(alignment: Alignment, first: Node, second: Node) -> Hypothesis:
    """Return that JAX takes two values of both sides for one another."""
    one = _side_by_side(alignment, first, alignment.torch_of[first][0])
    other = _side_by_side(alignment, second, alignment.torch_of[second][0])
    ours = _together(one.flax.taken(), other.flax.taken())
    theirs = _together(one.torch.taken(), other.torch.taken())
    return Hypothesis(one.torch.node.module, first.operation, "exchange", ours, theirs)


def of_constants(alignment: Alignment, flax: Node, torch: Node, opposite: bool) -> Hypothesis:
    """Return that two arrays differ that depend on no input.

    Args:
        alignment: values that both runs have.
        flax: array of JAX.
        torch: array of PyTorch.
        opposite: whether one of two masks says what the other one hides.
    """
    explained = _side_by_side(alignment, flax, torch)
    here, there = explained.flax.builder.written(flax), explained.torch.builder.written(torch)
    if opposite:
        there = Expression("not", (there,), (), torch)
    gap = Gap("constant", "operation", here, there)
    ours = explained.flax.program.users[flax][0]
    theirs = explained.torch.program.users[torch][0]
    return explained.hypothesis(gap, ours, theirs)


def _together(first: Side, second: Side) -> Side:
    """Return what one side has at two places."""
    lines = tuple(dict.fromkeys((*first.places, *second.places)))
    value = f"{first.value} and {second.value}"
    expression = f"{first.expression}; {second.expression}"
    return Side(value, expression, lines, first.length + second.length)


def _side_by_side(alignment: Alignment, flax: Node, torch: Node) -> _Explained:
    """Return two nodes of which none replaces the other."""
    return _Explained(Repair(flax, torch, alignment, flax.value))


def _first_of(nodes: Sequence[Node]) -> list[Node]:
    """Return those of some nodes that are computed from none of them."""
    inside = set(nodes)
    return [node for node in nodes if node.operands and inside.isdisjoint(node.operands)]


def _hides_alike(repair: Repair) -> bool:
    """Whether what PyTorch hides by large negative numbers is hidden in JAX: here, or later."""
    alignment, node, right = repair.before, repair.flax, repair.value
    current = alignment.value(node)
    if right.dtype.kind != "f" or current.dtype.kind != "f":
        return False
    hidden = right <= -HIDING
    if not hidden.any():
        return False
    hides = current <= -HIDING
    if hides.any():
        return np.array_equal(hides, hidden)
    shown = np.where(hidden, current, right)
    with_hiding = alignment.rerun({node: right})
    without = alignment.rerun({node: shown})
    for output in alignment.flax.outputs.values():
        first, second = (changed.get(output, output.value) for changed in (with_hiding, without))
        if not same_array(first, second):
            return False
    return True


def _is_of_hiding(gap: Gap) -> bool:
    """Whether a gap is that of two numbers that hide what is in their place."""
    return gap.flax is not None and gap.torch is not None and both_hide(gap.flax, gap.torch)


class _Reader:
    """One side of a repair: what its nodes compute, and how that is written.

    Args:
        node: node of this side that was replaced, or that replaces the other.
        before: the alignment before.
        numbers: the number of each value that both runs have.
        module: module of the node of PyTorch.
        ours: whether this is the side of JAX.
    """

    def __init__(
        self, node: Node, before: Alignment, numbers: Mapping[Node, int], module: str, ours: bool
    ):
        self.node = node
        self.program = before.flax if ours else before.torch
        self.shared = before.torch_of if ours else before.flax_of
        self.builder = Builder(numbers, self.program.varying)
        self.names = Names(before, self.builder.written, module, ours)
        self.expression = self.builder(node)

    def taken(self) -> Side:
        """Return a value that both have, by its name, and as this side computes it."""
        leaf = self.builder.leaf(self.node)
        name = text(leaf, self.names)
        expression = text(self.builder.written(self.node), self.names)
        made = [moved_from(one) for one in self.node.operands if one in self.program.varying]
        lines = places([*made, self.node, *self.program.users[self.node]])
        return Side(name, expression, lines, len(name))

    def opened(self, part: Expression) -> Expression:
        """Return a value that both have as what this side computes it from."""
        if part.operation != "leaf" or part.origin is None:
            return part
        return self.builder.written(part.origin)

    def whole(self) -> Side:
        """Return the whole expression."""
        written = text(self.expression, self.names)
        lines = places([self.node, *_origins(self.expression)])
        return Side(written, written, lines, len(whole(self.expression, self.names)))

    def at_gap(self, gap: Gap, part: Expression | None, node: Node, enclosing: Node | None) -> Side:
        """Return what this side has at a gap inside of a node."""
        value, length = "", 0
        if part is not None:
            value, length = text(part, self.names), len(whole(part, self.names))
        lines = places(self._nodes_at(gap, part, node, enclosing))
        return Side(value, text(self._expression_of(node), self.names), lines, length)

    def _nodes_at(
        self, gap: Gap, part: Expression | None, node: Node, enclosing: Node | None
    ) -> list[Node]:
        """Return the nodes at a gap, those first whose lines say most."""
        origin = None if part is None else part.origin
        first = origin or enclosing
        nodes = [moved_from(node), node]
        if first is not None:
            nodes.insert(0, first)
        # What a run is given has no line but those that read it.
        if origin is not None and origin.place is None:
            nodes = [
                user for user in self.program.users[origin] if user.order <= node.order
            ] + nodes
        if part is not None and part.operation == "leaf":
            # What is wrong is that it is taken here, wherever it was computed.
            made = [] if origin is None else [moved_from(origin)]
            nodes = [*self._wrong_users(node), enclosing or node, *made, *nodes]
        if gap.scaled is not None or (gap.parameter == "factor" and not _lacks(part, "factor")):
            nodes = self.builder.scaling(nodes[0], gap.scaled) + nodes
        if _lacks(part, gap.parameter):
            # What is missing may be missed where the other operands come from as well.
            nodes += self._wrong_users(node)
            computed = part if part is not None and part.operands else self._expression_of(node)
            nodes += self.builder.makers(computed)
        elif part is not None and gap.parameter == "operation":
            nodes[1:1] = _origins(part)
        return nodes

    def _expression_of(self, node: Node) -> Expression:
        return self.expression if node is self.node else self.builder.written(node)

    def moved(self, node: Node, moves: Sequence[Node]) -> Side:
        """Return the operations that move the numbers of a node."""
        expression = text(self.builder.written(node), self.names)
        # What is given to a run has no line but those of what computes with it.
        users = () if node.operands else self.program.users[node]
        lines = places([node, *reversed(moves), *users])
        return Side(shown(moves), expression, lines, len(shown(moves)))

    def along(self, node: Node, along: Along) -> Side:
        """Return the axes of an operation, in the layout of both sides and in its own."""
        axes, shape = along
        value = f"axis {plain(axes)} of {plain(shape)}"
        if along != axes_of(node):
            own, _ = axes_of(node)
            value += f", which is axis {plain(own)} in PyTorch"
        expression = text(self.builder.written(node), self.names)
        return Side(value, expression, places([node]), len(value))

    def _wrong_users(self, node: Node) -> list[Node]:
        """Return what this side alone computes with a replaced node that is a value of both."""
        if node is not self.node or node not in self.shared:
            return []
        users = beyond_layout(node, self.program.users)
        return [user for user in users if user not in self.shared]


class _Explained:
    """The expressions of a pair of nodes over the values that both sides have."""

    def __init__(self, repair: Repair):
        self.repair = repair
        before = repair.before
        module = repair.torch.module
        numbers = in_order(before)
        self.flax = _Reader(repair.flax, before, numbers, module, ours=True)
        self.torch = _Reader(repair.torch, before, numbers, module, ours=False)
        # What both hide is no difference.
        if _hides_alike(repair):
            for side in (self.flax, self.torch):
                side.expression = without_hiding(side.expression)

    def hypotheses(self) -> Iterator[Hypothesis]:
        """Yield what differs."""
        found = self._gaps()
        # What is written alike differs in where its numbers are.
        named_apart = [gap for gap in found if self._named(gap.flax) != self._named(gap.torch)]
        # By which number something is hidden makes no difference beside another one.
        differing = [gap for gap in named_apart if not _is_of_hiding(gap)] or named_apart
        told = grouped_by_kind(map(self.hypothesis, differing))
        if not told:
            yield self._layout()
        elif len(told) > FEW or len(found) > MANY:
            yield self._whole()
        else:
            yield from told
            yield from self._covered(differing)

    def _covered(self, found: Sequence[Gap]) -> Iterator[Hypothesis]:
        """Yield which order of numbers differs as well, if what differs is not all."""
        alignment, top, right = self.repair.before, self.repair.flax, self.repair.value
        origins = [gap.flax.origin for gap in found if gap.flax]
        replaced = [origin for origin in origins if origin]
        layouts = [list(layouts_of(gap)) for gap in found]
        after = []
        for values in islice(product(*layouts), COMBINED):
            given = dict(zip(replaced, values, strict=True))
            changed = alignment.rerun(given, until=top)
            reached = changed.get(top, alignment.value(top))
            if same_array(reached, right):
                return
            after.append(alignment.with_changed(changed))
        # The first layout after which an order is found is the one that is meant.
        for other in after:
            order = narrowed(other, top, right)
            if order is not None:
                flax, torch, value = order
                yield from explain(Repair(flax, torch, other, value))
                return

    def _named(self, part: Expression | None) -> str:
        """Return a part of either side in plain notation, over names of PyTorch."""
        return "" if part is None else text(part, self.torch.names)

    def same_operands(self) -> list[Hypothesis]:
        """Return what differs if both compute with the same values, and nothing else."""
        found = self._gaps()
        if any(gap.parameter in WHOLE[:3] for gap in found):
            return []
        return [self.hypothesis(gap) for gap in found[: FEW + 1]]

    def _gaps(self) -> list[Gap]:
        found = islice(gaps(self.flax.expression, self.torch.expression), MANY + 1)
        return [self._opened(gap) for gap in found]

    def _opened(self, gap: Gap) -> Gap:
        """Return a gap with a value that both have written out, if its operation differs little."""
        if gap.parameter != "operation" or gap.flax is None or gap.torch is None:
            return gap
        ours = self.flax.opened(gap.flax)
        theirs = self.torch.opened(gap.torch)
        inside = list(islice(gaps(ours, theirs), 2))
        if len(inside) != 1:
            return gap
        inner = inside[0]
        one_is_shared = (gap.flax.operation == "leaf") != (gap.torch.operation == "leaf")
        # By chance something else has the value of one side, and not of the other.
        if one_is_shared and ours.operation == theirs.operation:
            return inner
        if inner.parameter not in WHOLE:
            return replace(gap, flax=ours, torch=theirs)
        if inner.parameter not in ("term", "base"):
            return gap
        # A value that both have hides a part of it that one side lacks.
        return inner if inner.flax is None or inner.torch is None else gap

    def hypothesis(
        self, gap: Gap, ours: Node | None = None, theirs: Node | None = None
    ) -> Hypothesis:
        """Return a gap inside of two nodes, or of those that were replaced, with both sides."""
        ours = ours or self.flax.node
        theirs = theirs or self.torch.node
        here = self.flax.at_gap(gap, gap.flax, ours, gap.flax_at)
        there = self.torch.at_gap(gap, gap.torch, theirs, gap.torch_at)
        parameter = gap.parameter
        note = few_apart(gap) or times_apart(gap)
        rounded = rounded_apart(gap)
        if rounded:
            parameter, note = "rounding", f"{rounded:.1e}"
        module = theirs.module
        # A value that both have stands where it is used.
        if gap.torch is not None and gap.torch.operation != "leaf":
            origin = gap.torch.origin
            if origin is not None and origin.place is not None:
                module = origin.module
        return Hypothesis(module, gap.operation, parameter, here, there, note=note)

    def _whole(self) -> Hypothesis:
        theirs = self.torch.node
        sides = self.flax.whole(), self.torch.whole()
        return Hypothesis(theirs.module, theirs.operation, "expression", *sides)

    def _layout(self) -> Hypothesis:
        """Return what moves numbers to other places, where both compute the same of them."""
        alignment, right = self.repair.before, self.repair.value
        inner = innermost(self.flax.expression, self.torch.expression)
        if inner is not None:
            return self._parameters(*inner)
        ours, theirs = self.flax.node, self.torch.node
        found = narrowed(alignment, ours, right)
        if found is None:
            rounded = rounded_by(alignment.value(ours), right)
            if rounded:
                return replace(self._whole(), parameter="rounding", note=f"{rounded:.1e}")
            gathered = self._gathered(self.flax.expression.origin, self.torch.expression.origin)
            return gathered or self._moved_by_steps(ours, theirs)
        ours, theirs, right = found
        ours, right = self._moved_on(ours, right)
        theirs = last_move(alignment.torch, theirs)
        note = relation(alignment.value(ours), right)
        gathered = self._gathered(ours, theirs)
        if gathered is not None:
            return replace(gathered, note=gathered.note or note)
        return replace(self._moved_by_steps(ours, theirs), note=note)

    def _gathered(self, ours: Node | None, theirs: Node | None) -> Hypothesis | None:
        """Return what differs in how both gather numbers, which says more than their order.

        It is None where they do not come from one operation, or from the same indices.
        """
        if ours is None or theirs is None:
            return None
        here = self.flax.builder.written(moved_from(ours))
        there = self.torch.builder.written(moved_from(theirs))
        if here.operation != there.operation or here.operation == "source":
            return None
        inside = list(islice(gaps(here, there), 2))
        if len(inside) == 1:
            return self.hypothesis(inside[0], ours, theirs)
        if not inside or here.operation != "gather":
            return None
        indices = Gap("gather", "indices", here.operands[1], there.operands[1])
        return self.hypothesis(indices, ours, theirs)

    def _moved_by_steps(self, ours: Node, theirs: Node) -> Hypothesis:
        before = self.repair.before
        return self.moved(ours, theirs, steps(before, ours, True), steps(before, theirs, False))

    def moved(
        self, ours: Node, theirs: Node, here: Sequence[Node], there: Sequence[Node]
    ) -> Hypothesis:
        """Return the operations on either side that move the numbers of two nodes."""
        sides = self.flax.moved(ours, here), self.torch.moved(theirs, there)
        return Hypothesis(theirs.module, theirs.operation, "layout", *sides)

    def _moved_on(self, node: Node, right: np.ndarray) -> tuple[Node, np.ndarray]:
        """Return the last operation that moves the numbers of a node, and its right value."""
        before = self.repair.before
        last = last_move(before.flax, node)
        changed = before.rerun({node: right}, until=last)
        return last, changed[last]

    def _parameters(self, flax: Expression, torch: Expression) -> Hypothesis:
        """Return the axes of an operation of the same operands with another result."""
        ours, theirs = flax.origin, torch.origin
        assert ours is not None
        assert theirs is not None
        moved = in_layout_of(flax, torch)
        sides = self.flax.along(ours, axes_of(ours)), self.torch.along(theirs, moved)
        return Hypothesis(theirs.module, theirs.operation, "axes", *sides)


def _lacks(part: Expression | None, parameter: str) -> bool:
    """Whether a side has nothing at a gap, or what it has is no operation."""
    if part is None or part.operation == "leaf" or parameter == "sign":
        return True
    return parameter in ("factor", "exponent") and part.number in (1, -1)


def _origins(expression: Expression) -> list[Node]:
    """Return the nodes of an expression, from the outside in, without the values in it."""
    operations = [one for one in parts(expression) if one.operation != "leaf"]
    return [one.origin for one in operations if one.origin is not None]
