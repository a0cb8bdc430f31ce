"""Gradients that one side stops and the other does not, where the outputs agree."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from flax_attn.parity import tolerance
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace import runs
from flax_attn.parity.trace.align import Alignment
from flax_attn.parity.trace.candidates import beyond_layout, is_shift
from flax_attn.parity.trace.hypothesis import Hypothesis, Side, places
from flax_attn.parity.trace.program import Node

# The ways to stop gradients that are tried.
TRIED = 40
# An operand of an operation of a jaxpr: the identity of the operation, and the index.
Operand = tuple[int, int]


@dataclass(frozen=True)
class Attempt:
    """A way to stop gradients in JAX.

    Args:
        removed: operations of JAX that stop gradients and no longer do.
        put: operations of PyTorch that stop gradients, and now do in JAX.
        stopped: operands of JAX to which no gradient flows.
    """

    removed: Sequence[Node]
    put: Sequence[Node]
    stopped: set[Operand]


def stopped_gradients(pair: Pair, traced: object, alignment: Alignment) -> list[Hypothesis]:
    """Return what stops gradients on one side alone, if that is the whole difference.

    The gradients of JAX are computed again without its `stop_gradient`, or with one where PyTorch
    detaches, or both: the first that makes all gradients agree is the difference.

    Args:
        pair: pair of modules whose outputs agree.
        traced: jaxpr of the JAX side.
        alignment: values that both runs have.
    """
    users = alignment.flax.users
    ours = [node for node in alignment.flax.nodes if _is_ours(node, users)]
    uses = {node: set(_uses(users[node], node)) for node in ours}
    errors = runs.gradients_with_stops(pair, traced)
    for attempt in islice(_attempts(alignment, uses), TRIED):
        if not (attempt.removed or attempt.put):
            continue
        found = errors(attempt.stopped).values()
        if all(error <= tolerance.GRADIENT for error in found):
            return _hypotheses(alignment, attempt, set().union(*uses.values()))
    return []


def _attempts(alignment: Alignment, uses: Mapping[Node, set[Operand]]) -> Iterator[Attempt]:
    """Yield the ways to stop gradients, the likely ones first.

    Args:
        alignment: values that both runs have.
        uses: operands to which each `stop_gradient` of JAX lets no gradient flow.
    """
    ours = list(uses)
    theirs = [node for node in alignment.torch.nodes if _is_detached(node)]
    detached = {node: set(_counterparts(alignment, node)) for node in theirs}
    own = set().union(*uses.values())
    added = set().union(*detached.values())
    yield Attempt(ours, [], set())
    yield Attempt([], theirs, own | added)
    yield Attempt(ours, theirs, added)
    for node in ours:
        yield Attempt([node], [], own - uses[node])
    # Where values do not say which operand is meant, each that holds the number is tried.
    for node in theirs:
        yield from _with_each(alignment, Attempt([], [], own), node)
    # A line may stop other operands than PyTorch's does, as in a straight-through estimate.
    missing = [node for node in theirs if own.isdisjoint(detached[node])]
    for nodes in _by_line(ours):
        removed = set().union(*(uses[node] for node in nodes))
        without = Attempt(nodes, [], own - removed)
        yield without
        for node in missing:
            yield from _with_each(alignment, without, node)


def _with_each(alignment: Alignment, attempt: Attempt, detached: Node) -> Iterator[Attempt]:
    """Yield an attempt with each operand of JAX that holds a value that PyTorch detaches."""
    for node in alignment.flax_of.get(detached, ()):
        for operand in _uses(alignment.flax.users[node], node):
            stopped = attempt.stopped | {operand}
            yield Attempt(attempt.removed, [detached], stopped)


def _hypotheses(alignment: Alignment, attempt: Attempt, own: set[Operand]) -> list[Hypothesis]:
    """Return what an attempt removes and puts, beside what the other side has there."""
    found = []
    for node in attempt.removed:
        others = alignment.torch_of.get(node, [])
        found.append(_hypothesis(node, others[-1:]))
    takers = _takers(alignment, attempt.stopped - own)
    found += [_hypothesis(node, takers) for node in attempt.put]
    return list({one.kind: one for one in found}.values())


def _by_line(nodes: Sequence[Node]) -> list[list[Node]]:
    """Return nodes in groups of one line of source each."""
    lines: dict[str, list[Node]] = {}
    for node in nodes:
        lines.setdefault(str(node.place), []).append(node)
    return list(lines.values())


def _is_ours(node: Node, users: Mapping[Node, Sequence[Node]]) -> bool:
    stops = node.operation == "stop_gradient" and node.place is not None
    # The softmax of JAX stops the gradient of its maximum, which has none.
    return stops and not is_shift(node, users)


def _is_detached(node: Node) -> bool:
    return node.operation == "detach" and node.place is not None


def _uses(users: Sequence[Node], operand: Node) -> Iterator[Operand]:
    for user in users:
        for i, other in enumerate(user.operands):
            if other is operand and user.equation is not None:
                yield id(user.equation), i


def _counterparts(alignment: Alignment, detached: Node) -> Iterator[Operand]:
    """Yield the operands of JAX that PyTorch detaches."""
    for user in beyond_layout(detached, alignment.torch.users):
        for node in alignment.flax_of.get(user, ()):
            for operand in node.operands:
                if detached in alignment.torch_of.get(operand, ()):
                    yield from _uses([node], operand)


def _takers(alignment: Alignment, operands: Collection[Operand]) -> list[Node]:
    """Return the operations of JAX that take these operands, and the operands."""
    found = []
    for node in alignment.flax.nodes:
        for i, operand in enumerate(node.operands):
            if (id(node.equation), i) in operands:
                found += [node, operand]
    return found


def _hypothesis(node: Node, others: Sequence[Node]) -> Hypothesis:
    """Return the hypothesis of a node that stops the gradient, beside what the other side has."""
    assert node.place is not None
    there = places(others)
    here = Side(node.operation, node.place.source, (node.place,))
    beside = Side("", there[0].source if there else "", there)
    if _is_detached(node):
        return Hypothesis(node.module, node.operation, "gradient", beside, here)
    # The submodule that is named is the one of PyTorch.
    module = there[0].module if there else node.module
    return Hypothesis(module, node.operation, "gradient", here, beside)
