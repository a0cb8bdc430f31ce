"""Hypotheses about what differs between the nodes that a search found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from flax_attn.parity.trace.axes import axes_of, in_layout_of, innermost
from flax_attn.parity.trace.builder import Builder
from flax_attn.parity.trace.candidates import beyond_layout
from flax_attn.parity.trace.expression import Expression, parts
from flax_attn.parity.trace.gaps import Gap, gaps
from flax_attn.parity.trace.hypothesis import Hypothesis, Side, grouped_by_kind, places
from flax_attn.parity.trace.moves import last_move, narrowed, relation, shown, steps, turns
from flax_attn.parity.trace.notation import Names, plain, text, whole
from flax_attn.parity.trace.numbers import same_array
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
        shared = in_order(repair.before)
        self.flax_builder = Builder(shared, repair.before.flax.varying)
        self.torch_builder = Builder(shared, repair.before.torch.varying)
        self.names = (
            Names(repair.before, self.flax_builder.written, repair.torch.module, ours=True),
            Names(repair.before, self.torch_builder.written, repair.torch.module),
        )
        self.flax = self.flax_builder(repair.flax)
        self.torch = self.torch_builder(repair.torch)

    def hypotheses(self) -> Iterator[Hypothesis]:
        """Yield what differs."""
        found = self._gaps()
        ends = self.repair.flax, self.repair.torch
        # What is written alike differs in where its numbers are.
        differing = [gap for gap in found if self._named(gap.flax) != self._named(gap.torch)]
        told = grouped_by_kind(self._hypothesis(gap, *ends) for gap in differing)
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
        replaced = [gap.flax.origin for gap in found if gap.flax and gap.flax.origin]
        layouts = [list(layouts_of(gap)) for gap in found]
        after = []
        for values in islice(product(*layouts), COMBINED):
            changed = alignment.rerun(dict(zip(replaced, values, strict=True)), until=top)
            if same_array(changed.get(top, alignment.value(top)), right):
                return
            after.append(alignment.with_changed(changed))
        for other in after:
            order = narrowed(other, top, right)
            if order is not None:
                flax, torch, value = order
                yield from explain(Repair(flax, torch, other, value))
                return

    def _named(self, part: Expression | None) -> str:
        """Return a part of either side in plain notation, over names of PyTorch."""
        return "" if part is None else text(part, self.names[1])

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
        shared = [part.operation == "leaf" for part in (gap.flax, gap.torch)]
        # By chance something else has the value of one side, and not of the other.
        if any(shared) and not all(shared) and ours.operation == theirs.operation:
            return inner
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
        for node, builder, names, part in (
            (ours, self.flax_builder, self.names[0], gap.flax),
            (theirs, self.torch_builder, self.names[1], gap.torch),
        ):
            value = "" if part is None else text(part, names)
            length = 0 if part is None else len(whole(part, names))
            top = self._expression(node, builder)
            enclosing = gap.flax_at if node is ours else gap.torch_at
            within = None if part is None else part.origin
            lines = [
                one for one in (within or enclosing, moved_from(node), node) if one is not None
            ]
            if part is not None and part.operation == "leaf":
                # What is wrong is that it is taken here, wherever it was computed.
                made = [] if within is None else [moved_from(within)]
                lines = [*self._wrong_users(node), enclosing or node, *made, *lines]
            if gap.scaled is not None:
                lines = [*builder.scaling(lines[0], gap.scaled), *lines]
            if _lacks(part, gap.parameter):
                # What is missing may be missed where the other operands come from as well.
                lines += self._wrong_users(node)
                lines += builder.makers(part if part and part.operands else top)
            elif part is not None and gap.parameter == "operation":
                lines[1:1] = _origins(part)
            sides.append(Side(value, text(top, names), places(lines), length))
        note = few_apart(gap) or times_apart(gap)
        rounded = rounded_apart(gap)
        if rounded:
            gap, note = replace(gap, parameter="rounding"), f"{rounded:.1e}"
        # A value that both have stands where it is used.
        own = None if gap.torch is None or gap.torch.operation == "leaf" else gap.torch
        origin = own and own.origin
        module = theirs.module if origin is None or origin.place is None else origin.module
        return Hypothesis(module, gap.operation, gap.parameter, *sides, note=note)

    def _wrong_users(self, node: Node) -> list[Node]:
        """Return what one side alone computes with a replaced node that is a value of both."""
        before = self.repair.before
        for end, program, shared in (
            (self.repair.flax, before.flax, before.torch_of),
            (self.repair.torch, before.torch, before.flax_of),
        ):
            if node is end and node in shared:
                users = beyond_layout(node, program.users)
                return [user for user in users if user not in shared]
        return []

    def _expression(self, node: Node, builder: Builder) -> Expression:
        if node is self.repair.flax:
            return self.flax
        return self.torch if node is self.repair.torch else builder.written(node)

    def _whole(self) -> Hypothesis:
        sides = []
        both = (self.repair.flax, self.flax), (self.repair.torch, self.torch)
        for (node, top), names in zip(both, self.names, strict=True):
            written = text(top, names)
            sides.append(
                Side(written, written, places([node, *_origins(top)]), len(whole(top, names)))
            )
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
        for node, builder, program, names, own in (
            (ours, self.flax_builder, alignment.flax, self.names[0], moves[0]),
            (theirs, self.torch_builder, alignment.torch, self.names[1], moves[1]),
        ):
            expression = text(builder.written(node), names)
            # What is given to a run has no line but those of what computes with it.
            users = () if node.operands else program.users[node]
            lines = places([node, *reversed(own), *users])
            sides.append(Side(shown(own), expression, lines, len(shown(own))))
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
        for node, builder, names, along in (
            (ours, self.flax_builder, self.names[0], axes_of(ours)),
            (theirs, self.torch_builder, self.names[1], moved),
        ):
            axes, shape = along
            value = f"axis {plain(axes)} of {plain(shape)}"
            if along != axes_of(node):
                value += f", which is axis {plain(axes_of(node)[0])} in PyTorch"
            expression = text(builder.written(node), names)
            sides.append(Side(value, expression, places([node]), len(value)))
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
