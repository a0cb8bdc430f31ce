"""The steps of a loop of PyTorch as one operation over all of them, as JAX has them in a batch."""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from flax_attn.parity.trace.program import Node, Program

# What numbers a layer, or an expert, that a loop goes through.
NUMBER = r"\d+"
# Parameters that name axes, which are counted from the steps on.
AXES = ("axes", "axis")


def with_steps_together(program: Program) -> Program | None:
    """Return a run with a value more for each line of a loop: those of all steps, stacked.

    It is None where the run has no loop.
    """
    own = _copied(program)
    together = _Together()
    for nodes in _steps(own):
        together.add(nodes)
    if not together.made:
        return None
    nodes = list(own.nodes)
    # From the end, so that places before are as they were: what was made last comes first.
    latest = together.made[::-1]
    last_first = sorted(latest, key=lambda pair: -pair[0].order)
    for last, node in last_first:
        nodes.insert(last.order + 1, node)
    return Program(nodes, own.outputs)


def _copied(program: Program) -> Program:
    """Return a run with nodes of its own, whose places in it differ from those in the other."""
    copies: dict[Node, Node] = {}
    for node in program.nodes:
        operands = tuple(copies[operand] for operand in node.operands)
        copies[node] = replace(node, operands=operands)
    outputs = {name: copies[node] for name, node in program.outputs.items()}
    return Program(list(copies.values()), outputs)


def with_steps_of(matched: Collection[Node]) -> set[Node]:
    """Return nodes that JAX has as well, with the steps of those that hold steps."""
    found = set(matched)
    for node in matched:
        found.update(node.steps)
    return found


def beside(nodes: Sequence[Node], program: Program, matched: Collection[Node]) -> list[Node]:
    """Return some nodes, and those that hold steps among them and do not match, in order."""
    found = set(nodes)
    more = []
    for node in program.nodes:
        if node.steps and node not in matched and found.issuperset(node.steps):
            more.append(node)
    return sorted([*nodes, *more], key=lambda node: node.order)


def _steps(program: Program) -> list[list[Node]]:
    """Return the values that the same lines compute, in the order of what comes last in each."""
    placed = [node for node in program.nodes if node.place is not None and node.operands]
    groups = _grouped(placed, "")
    # A loop goes through the tokens of one layer, or through several layers of one kind.
    alone = [nodes[0] for nodes in groups if len(nodes) == 1]
    groups += _grouped(sorted(alone, key=lambda node: node.order), NUMBER)
    several = [nodes for nodes in groups if len(nodes) > 1]
    return sorted(several, key=lambda nodes: nodes[-1].order)


def _grouped(nodes: Sequence[Node], ignored: str) -> list[list[Node]]:
    """Return nodes of one line, operation and shape together; of the module a part is ignored."""
    found: dict[tuple, list[Node]] = {}
    for node in nodes:
        assert node.place is not None
        place = node.place
        module = re.sub(ignored, "", place.module) if ignored else place.module
        of_line = place.file, place.line, place.callers, module
        shape, kind = node.value.shape, node.value.dtype.str
        key = *of_line, node.operation, node.parameters.get("result"), shape, kind
        found.setdefault(key, []).append(node)
    return list(found.values())


class _Together:
    """Makes one value of those of all steps."""

    def __init__(self) -> None:
        # The last of the steps, and what is made of all of them.
        self.made: list[tuple[Node, Node]] = []
        self._known: dict[tuple[Node, ...], Node] = {}

    def add(self, nodes: Sequence[Node]) -> None:
        """Make the value of some steps."""
        self._value(tuple(nodes))

    def _value(self, nodes: tuple[Node, ...]) -> Node:
        if nodes in self._known:
            return self._known[nodes]
        value = np.stack([node.value for node in nodes])
        first = nodes[0]
        operands = self._operands(nodes)
        operation, parameters = first.operation, _moved(first)
        if not operands:
            operation, operands, parameters = "stack", nodes, {}
        # What takes one element after another is all that it takes them of.
        elif operation == "element" and operands == first.operands:
            operation, parameters = "transpose", {}
        made = Node(operation, operands, value, parameters, first.place, steps=nodes)
        self._known[nodes] = made
        self.made.append((nodes[-1], made))
        return made

    def _operands(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return the operands of all steps; none where steps take what is no value of all."""
        found = []
        for given in zip(*(node.operands for node in nodes), strict=False):
            if len(set(given)) == 1:
                found.append(given[0])
            elif given in self._known:
                found.append(self._known[given])
            elif not any(one.operands for one in given) and _are_alike(given):
                found.append(self._value(given))
            else:
                return ()
        return tuple(found)


def _are_alike(nodes: Sequence[Node]) -> bool:
    return len({node.value.shape for node in nodes}) == 1


def _moved(node: Node) -> dict:
    """Return the parameters of a step with axes as they are with the steps in front."""
    found = dict(node.parameters)
    for name in AXES:
        axes = found.get(name)
        if isinstance(axes, int):
            found[name] = axes + 1
        elif isinstance(axes, tuple):
            found[name] = tuple(axis + 1 for axis in axes)
    return found
