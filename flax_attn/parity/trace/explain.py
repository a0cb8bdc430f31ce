"""Hypotheses about what differs between the nodes that a search found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from flax_attn.parity.trace.align import Alignment, Repair, cone
from flax_attn.parity.trace.apart import few_apart, rounded_apart, rounded_by
from flax_attn.parity.trace.axes import axes_of, in_layout_of, innermost
from flax_attn.parity.trace.builder import Builder
from flax_attn.parity.trace.expression import Expression, parts
from flax_attn.parity.trace.gaps import Gap, gaps
from flax_attn.parity.trace.hypothesis import Hypothesis, Side
from flax_attn.parity.trace.moves import last_move, narrowed, relation, shown, steps, turns
from flax_attn.parity.trace.notation import Names, plain, text
from flax_attn.parity.trace.numbers import is_laid_out
from flax_attn.parity.trace.program import Node, Place

# Operations that put numbers to other places, beside those that reorder axes.
REARRANGING = ("concat", "flip", "gather", "stack", "roll")
# What differs as a whole.
WHOLE = ("operation", "operand", "order", "term", "base")
# More gaps than these are not told apart: the whole expressions say what differs. Those of repeated
# steps are one.
FEW, MANY = 4, 48


def explain(repair: Repair) -> list[Hypothesis]:
    """Return what differs at a node that was replaced."""
    return list(_Explained(repair).hypotheses())


def grouped_by_kind(every: Iterable[Hypothesis]) -> tuple[Hypothesis, ...]:
    """Return hypotheses, of which those of repeated layers are one."""
    grouped: dict[tuple, Hypothesis] = {}
    for one in every:
        known = grouped.get(one.kind)
        if known is None:
            grouped[one.kind] = one
        elif one.node not in (known.node, *known.also):
            grouped[one.kind] = replace(known, also=(*known.also, one.node))
    return tuple(grouped.values())


def parted(alignment: Alignment, wrong: Sequence[str]) -> list[Hypothesis]:
    """Return what differs where the programs part, if no value of one fits into the other.

    Args:
        alignment: values that both runs have.
        wrong: names of the outputs that differ.
    """
    ours = cone([alignment.flax.outputs[name] for name in wrong], alignment.torch_of)
    theirs = cone([alignment.torch.outputs[name] for name in wrong], alignment.flax_of)
    first = [node for node in ours if node.operands and not set(node.operands) & set(ours)]
    others = [node for node in theirs if node.operands and not set(node.operands) & set(theirs)]
    found = []
    for flax in first:
        for torch in others:
            if flax.operation == torch.operation:
                found += _Explained(Repair(flax, torch, alignment, flax.value)).same_operands()
    for name in wrong:
        flax, torch = alignment.flax.outputs[name], alignment.torch.outputs[name]
        # Numbers that both have throughout are moved on the way.
        if torch in alignment.torch_of.get(flax, ()):
            explained = _Explained(Repair(flax, torch, alignment, flax.value))
            found.append(explained.moved(flax, torch, [turns(flax), turns(torch)]))
    return found[:FEW]


class _Explained:
    """The expressions of a pair of nodes over the values that both sides have."""

    def __init__(self, repair: Repair):
        self.repair = repair
        shared = _in_order(repair.before)
        self.flax_builder = Builder(shared, repair.before.flax.varying)
        self.torch_builder = Builder(shared, repair.before.torch.varying)
        self.names = Names(repair.before, self.torch_builder.written, repair.torch.module)
        self.flax = self.flax_builder(repair.flax)
        self.torch = self.torch_builder(repair.torch)

    def hypotheses(self) -> Iterator[Hypothesis]:
        """Yield what differs."""
        found = self._gaps()
        ends = self.repair.flax, self.repair.torch
        every = [self._hypothesis(gap, *ends) for gap in found]
        # What is written alike differs in where its numbers are.
        told = grouped_by_kind(one for one in every if one.flax.value != one.torch.value)
        if not told:
            yield self._layout()
        elif len(told) > FEW or len(found) > MANY:
            yield self._whole()
        else:
            yield from told

    def same_operands(self) -> list[Hypothesis]:
        """Return what differs if both compute with the same values, and nothing else."""
        found = self._gaps()
        if any(gap.parameter in WHOLE[:3] for gap in found):
            return []
        ends = self.repair.flax, self.repair.torch
        return [self._hypothesis(gap, *ends) for gap in found[: FEW + 1]]

    def _gaps(self) -> list[Gap]:
        found = islice(gaps(self.flax, self.torch), MANY + 1)
        return [self._opened(gap) for gap in found]

    def _opened(self, gap: Gap) -> Gap:
        """Return a gap with a value that both have written out, if its operation differs little."""
        if gap.parameter != "operation" or gap.flax is None or gap.torch is None:
            return gap
        ours = self._written(gap.flax, self.flax_builder)
        theirs = self._written(gap.torch, self.torch_builder)
        inside = list(islice(gaps(ours, theirs), 2))
        if len(inside) != 1:
            return gap
        (inner,) = inside
        if inner.parameter not in WHOLE:
            return replace(gap, flax=ours, torch=theirs)
        # A value that both have hides a part of it that one side lacks.
        lacking = inner.parameter in ("term", "base") and None in (inner.flax, inner.torch)
        return inner if lacking else gap

    def _written(self, part: Expression, builder: Builder) -> Expression:
        if part.operation != "leaf" or part.origin is None:
            return part
        return builder.written(part.origin)

    def _hypothesis(self, gap: Gap, ours: Node, theirs: Node) -> Hypothesis:
        sides = []
        for node, builder, part in (
            (ours, self.flax_builder, gap.flax),
            (theirs, self.torch_builder, gap.torch),
        ):
            value = "" if part is None else text(part, self.names)
            whole = self._expression(node, builder)
            enclosing = gap.flax_at if node is ours else gap.torch_at
            within = enclosing if part is None or part.origin is None else part.origin
            lines = [node] if within is None else [within, node]
            if gap.scaled is not None:
                lines = [*builder.scaling(lines[0], gap.scaled), *lines]
            if _lacks(part, gap.parameter):
                # What is missing may be missed where the other operands come from as well.
                lines += self._wrong_users(node)
                lines += builder.makers(part if part and part.operands else whole)
            elif part is not None and gap.parameter == "operation":
                lines[1:1] = _origins(part)
            sides.append(Side(value, text(whole, self.names), places(lines)))
        note = few_apart(gap)
        rounded = rounded_apart(gap)
        if rounded:
            gap, note = replace(gap, parameter="rounding"), f"{rounded:.1e}"
        # A value that both have stands where it is used.
        own = None if gap.torch is None or gap.torch.operation == "leaf" else gap.torch
        origin = own and own.origin
        module = theirs.module if origin is None or origin.place is None else origin.module
        return Hypothesis(module, gap.operation, gap.parameter, *sides, note=note)

    def _wrong_users(self, node: Node) -> list[Node]:
        """Return what computes wrongly with a node of JAX that is a value that both have."""
        before = self.repair.before
        if node is not self.repair.flax or node not in before.torch_of:
            return []
        return [user for user in before.flax.users[node] if user not in before.torch_of]

    def _expression(self, node: Node, builder: Builder) -> Expression:
        if node is self.repair.flax:
            return self.flax
        return self.torch if node is self.repair.torch else builder.written(node)

    def _whole(self) -> Hypothesis:
        sides = []
        for node, whole in ((self.repair.flax, self.flax), (self.repair.torch, self.torch)):
            written = text(whole, self.names)
            sides.append(Side(written, written, places([node, *_origins(whole)])))
        theirs = self.repair.torch
        return Hypothesis(theirs.module, theirs.operation, "expression", *sides)

    def _layout(self) -> Hypothesis:
        """Return what moves numbers to other places, where both compute the same of them."""
        alignment = self.repair.before
        inner = innermost(self.flax, self.torch)
        if inner is not None:
            return self._parameters(*inner)
        found = narrowed(alignment, self.repair.flax, self.repair.value)
        ours, theirs = self.repair.flax, self.repair.torch
        rounded = rounded_by(alignment.value(ours), self.repair.value)
        if rounded and found is None:
            return replace(self._whole(), parameter="rounding", note=f"{rounded:.1e}")
        note = ""
        if found is not None:
            ours, theirs, right = found
            ours, right = self._moved_on(ours, right)
            theirs = last_move(alignment.torch, theirs)
            note = relation(alignment.value(ours), right)
            # What both gather by other indices says more than the order of what they gather.
            here = self.flax_builder.written(ours)
            there = self.torch_builder.written(theirs)
            inside = list(gaps(here, there))
            alike = here.operation == there.operation != "source"
            if len(inside) == 1 and alike:
                gap = self._hypothesis(inside[0], ours, theirs)
                return replace(gap, note=note or gap.note)
        moves = steps(alignment, ours, True), steps(alignment, theirs, False)
        return replace(self.moved(ours, theirs, moves), note=note)

    def moved(self, ours: Node, theirs: Node, moves: Sequence[list[Node]]) -> Hypothesis:
        """Return the operations that move the numbers of two nodes."""
        alignment = self.repair.before
        sides = []
        for node, builder, program, own in (
            (ours, self.flax_builder, alignment.flax, moves[0]),
            (theirs, self.torch_builder, alignment.torch, moves[1]),
        ):
            expression = text(builder.written(node), self.names)
            # What is given to a run has no line but those of what computes with it.
            users = () if node.operands else program.users[node]
            lines = places([node, *reversed(own), *users])
            sides.append(Side(shown(own), expression, lines))
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
        sides = []
        moved = in_layout_of(flax, torch)
        for node, builder, along in (
            (ours, self.flax_builder, axes_of(ours)),
            (theirs, self.torch_builder, moved),
        ):
            axes, shape = along
            value = f"axis {plain(axes)} of {plain(shape)}"
            if along != axes_of(node):
                value += f", which is axis {plain(axes_of(node)[0])} in PyTorch"
            expression = text(builder.written(node), self.names)
            sides.append(Side(value, expression, places([node])))
        return Hypothesis(theirs.module, theirs.operation, "axes", *sides)


def _in_order(alignment: Alignment) -> dict[Node, int]:
    """Return the quantities of nodes, except those of JAX that only rearrange their numbers."""
    found = dict(alignment.quantities)
    for node, others in alignment.torch_of.items():
        if node.operation in REARRANGING and node in alignment.flax.varying:
            values = [theirs.value for theirs in others if theirs.value.size == node.value.size]
            if not any(is_laid_out(alignment.value(node), value) for value in values):
                del found[node]
    return found


def _lacks(part: Expression | None, parameter: str) -> bool:
    """Whether a side has nothing at a gap, or what it has is no operation."""
    if part is None or part.operation == "leaf" or parameter == "sign":
        return True
    return parameter in ("factor", "exponent") and part.number in (1, -1)


def _origins(expression: Expression) -> list[Node]:
    """Return the nodes of an expression, from the outside in, without the values in it."""
    operations = [one for one in parts(expression) if one.operation != "leaf"]
    return [one.origin for one in operations if one.origin is not None]


def places(nodes: Iterable[Node]) -> tuple[Place, ...]:
    """Return the lines of nodes, each once."""
    lines: dict[tuple[str, int], Place] = {}
    for node in nodes:
        if node.place is not None:
            lines.setdefault((node.place.file, node.place.line), node.place)
    return tuple(lines.values())
