"""Expressions of the nodes of one run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from flax_attn.parity.trace.expression import Expression, leaves_of, number, scaled, split
from flax_attn.parity.trace.patterns import exponent, is_same, logsumexp_of, moved_from, softmax_of
from flax_attn.parity.trace.program import Node
from flax_attn.parity.trace.rules import RULES, SWAPPED, contained, sizes_over

# Operations inside one another that are read.
DEEPEST = 120
# The numbers of a constant that are written out.
FEW = 4


class Builder:
    """Makes expressions of the nodes of one run.

    Args:
        leaves: the number of each node that both runs have: the same for both of them.
        varying: nodes that depend on what the run is given, which are no numbers.
    """

    def __init__(self, leaves: Mapping[Node, int], varying: Collection[Node]):
        self.leaves, self.varying = leaves, varying
        self._depth = 0
        self._made: dict[Node, Expression] = {}
        # The node that first computes each shared value: the last to be written here.
        in_order = sorted(leaves, key=lambda node: node.order)
        shared = [node for node in reversed(in_order) if node in varying]
        self._first = {leaves[node]: node for node in shared}

    def leaf(self, node: Node) -> Expression:
        """Return the expression of a node as a value that both have."""
        return Expression("leaf", (), (self.leaves[node],), node)

    def makers(self, expression: Expression) -> list[Node]:
        """Return the nodes that first compute the shared values in an expression."""
        numbers = [leaf.settings[0] for leaf in leaves_of(expression)]
        return [self._first[number] for number in numbers if number in self._first]

    def scaling(self, top: Node, base: Expression | None) -> list[Node]:
        """Return the operations inside of a node that multiply by a number.

        They are those that multiply this expression, if there are any: a factor may be anywhere
        in a product.
        """
        multiplied = [x for x in self._inside(top) if x.operation in ("mul", "div", "neg")]
        if base is not None:
            found = [node for node in multiplied if split(self(node))[1] == base]
            if found:
                return found
        return [node for node in multiplied if self._takes_number(node)]

    def _takes_number(self, node: Node) -> bool:
        operands = [one for one in node.operands if one not in self.varying]
        return any(one.floating and one.constant for one in operands)

    def _inside(self, top: Node) -> Iterator[Node]:
        """Yield the nodes between a node and the shared values that it is computed from."""
        seen = {top}
        waiting = [top]
        while waiting:
            node = waiting.pop()
            yield node
            if node in self.leaves and node is not top:
                continue
            waiting += [operand for operand in node.operands if operand not in seen]
            seen.update(node.operands)

    def __call__(self, node: Node) -> Expression:
        """Return the expression of a node over shared values, which stand for themselves."""
        if node.constant and node not in self.varying and node.value.size:
            return number(float(node.value.reshape(-1)[0]), node)
        if node in self.leaves and not self._adds_little(node):
            return self.leaf(node)
        return self.written(node)

    def _adds_little(self, node: Node) -> bool:
        """Whether a node adds a number to a shared value, too small to make another value of it.

        An epsilon of 1e-12 is one, beside which another one of 1e-5 is to be told.
        """
        if node.operation != "add" or len(node.operands) != 2:
            return False
        numbers = [one for one in node.operands if one not in self.varying and one.constant]
        others = [one for one in node.operands if one in self.varying]
        same = [self.leaves.get(one) == self.leaves[node] for one in others]
        return len(numbers) == 1 and same == [True] and bool(numbers[0].value.any())

    def written(self, node: Node) -> Expression:
        """Return the operation of a node, also where its value is shared."""
        if node not in self._made:
            # What is far from any shared value is a value by itself.
            if self._depth == DEEPEST:
                return Expression("value", (), (node.order,), node)
            self._depth += 1
            try:
                self._made[node] = self._of(node)
            finally:
                self._depth -= 1
        return self._made[node]

    def _of(self, node: Node) -> Expression:
        if node.operation in ("source", "constant"):
            content = node.name or _contents(node.value)
            return Expression(node.operation, (), (content,), node)
        for name, sum_of in (("logsumexp", logsumexp_of), ("softmax", softmax_of)):
            summed = sum_of(node)
            if summed is not None:
                inner = self(exponent(summed))
                sizes = sizes_over(summed, summed.parameters["axes"])
                return Expression(name, (inner,), (sizes,), summed)
        operands = [self(operand) for operand in node.operands]
        _tell_apart(node, operands)
        # A choice that chooses one side everywhere is that side.
        if node.operation == "where":
            for operand, inner in zip(node.operands, operands, strict=True):
                if is_same(operand.value, node.value):
                    return inner
        if node.operation in RULES:
            return RULES[node.operation](node, operands)
        if node.operation in SWAPPED:
            swapped = tuple(reversed(operands))
            return Expression(SWAPPED[node.operation], swapped, (), node)
        return contained(node, operands)


def _contents(value: np.ndarray) -> str:
    """Return an array in words: its shape, and its numbers if they are few."""
    distinct = np.unique(value) if value.dtype.kind in "biuf" else np.zeros(0)
    shape = "x".join(map(str, value.shape))
    if len(distinct) > FEW:
        low, high = distinct[0], distinct[-1]
        return f"array {shape} from {low:.6g} to {high:.6g}"
    return f"array {shape} of {' and '.join(f'{float(x):.6g}' for x in distinct)}"


def _tell_apart(node: Node, operands: list[Expression]) -> None:
    """Mark the second operand where it reads like the first, and is another value."""
    is_sum = node.operation in ("add", "add_any")
    if not is_sum and node.operation not in ("sub", "mul", "div"):
        return
    second = operands[1]
    if _moved(node, operands):
        operands[1] = Expression("moved", (second,), (), node.operands[1])
    elif is_sum and _coincide(operands):
        factor, base = split(second)
        operands[1] = scaled(factor, Expression("other", (base,), (), base.origin))


def _moved(node: Node, operands: Sequence[Expression]) -> bool:
    """Whether both operands hold the same numbers in another layout, as `x` and its transpose."""
    own, first = split(operands[0])
    other, second = split(operands[1])
    if first != second or operands[0].number is not None:
        return False
    ours, theirs = [operand.value for operand in node.operands[:2]]
    if ours.shape != theirs.shape:
        return True
    # The same array, perhaps times a number.
    expected = ours * (other / own)
    return not np.allclose(expected, theirs, rtol=1e-9, atol=1e-300)


def _coincide(operands: Sequence[Expression]) -> bool:
    """Whether the terms of a sum are two values that happen to be equal, as two losses are."""
    first, second = split(operands[0])[1], split(operands[1])[1]
    if first.operation != "leaf" or first != second:
        return False
    assert first.origin is not None
    assert second.origin is not None
    return moved_from(first.origin) is not moved_from(second.origin)
