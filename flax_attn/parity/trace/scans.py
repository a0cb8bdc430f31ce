"""Find a scan of JAX that runs its steps in the other order than the loop of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice, takewhile

import numpy as np

from flax_attn.parity.trace.align import Alignment
from flax_attn.parity.trace.hypothesis import Hypothesis, Side, places
from flax_attn.parity.trace.program import Node, Program
from flax_attn.parity.trace.trials import Changed

# The scans that are run backward, each to the end of the run.
TRIED = 12
# The elements that each step of a scan takes, by their index, in the order of the run.
Steps = dict[int, list[Node]]
_ORDERS = ("from the first to the last", "from the last to the first")


def turned_scan(alignment: Alignment) -> tuple[int, Hypothesis, Changed] | None:
    """Return the scan that makes all outputs agree if it runs in the other order, if one does.

    Returned are its place in the run of PyTorch, what is said of it, and the values that change.
    """
    if not alignment.wrong():
        return None
    scans = (steps for steps in _scans(alignment.flax) if len(steps) > 1)
    for steps in islice(scans, TRIED):
        changed = _turned(alignment, steps)
        if not alignment.wrong(changed):
            return *_explained(alignment, steps), changed
    return None


def _scans(program: Program) -> Iterator[Steps]:
    """Yield the steps of every scan."""
    scans: dict[tuple[Node, ...], Steps] = {}
    for index, nodes in groupby(program.nodes, _index):
        if index is None:
            continue
        taken = list(nodes)
        sequences = tuple(node.operands[0] for node in taken)
        steps = scans.setdefault(sequences, {})
        # Another scan takes the elements of the same sequences once more.
        if index in steps:
            yield steps
            steps = scans[sequences] = {}
        steps[index] = taken
    yield from scans.values()


def _index(node: Node) -> int | None:
    return node.parameters["index"] if node.operation == "element" else None


def _turned(alignment: Alignment, steps: Steps) -> Changed:
    """Return the values that change if a scan takes its elements from the other end."""
    replaced: Changed = {}
    last = len(steps) - 1
    for index, taken in steps.items():
        for node, other in zip(taken, steps[last - index], strict=True):
            replaced[node] = alignment.value(other)
    changed = alignment.rerun(replaced)
    # What the steps return lies in the order of the elements again.
    stacked = [node for node in _stacked(alignment.flax, steps) if node in changed]
    if not stacked:
        return changed
    for node in stacked:
        replaced[node] = np.flip(changed[node], axis=0)
    return alignment.rerun(replaced)


def _stacked(program: Program, steps: Steps) -> list[Node]:
    """Return what the steps of a scan return, stacked."""
    (*_, last) = steps.values()
    after = program.nodes[program.nodes.index(last[-1]) + 1 :]
    own = takewhile(lambda node: node.operation != "element", after)
    return [node for node in own if node.operation == "stack" and node.place == last[-1].place]


def _explained(alignment: Alignment, steps: Steps) -> tuple[int, Hypothesis]:
    first = next(iter(steps))
    ours, theirs = _ORDERS if first == 0 else _ORDERS[::-1]
    taken = [node for nodes in steps.values() for node in nodes]
    found = [other for node in taken for other in alignment.matches_array(alignment.value(node))]
    sides = []
    for order, nodes in ((ours, taken), (theirs, found)):
        sides.append(Side(order, f"steps {order}", places(nodes), len(order)))
    # The elements are taken by the loop itself, or by a layer inside of it.
    module = min((node.module for node in found), key=len, default="")
    order = min((node.order for node in found), default=0)
    return order, Hypothesis(module, "scan", "steps", *sides)
