"""Gradients that one side stops and the other does not, where the outputs agree."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from flax_attn.parity import tolerance
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace import runs
from flax_attn.parity.trace.align import Alignment
from flax_attn.parity.trace.candidates import is_shift
from flax_attn.parity.trace.hypothesis import Hypothesis, Side, places
from flax_attn.parity.trace.patterns import LAYOUT
from flax_attn.parity.trace.program import Node

# The ways to stop gradients that are tried.
TRIED = 40


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
    theirs = [node for node in alignment.torch.nodes if _is_detached(node)]
    own = {key for node in ours for key in _uses(users[node], node)}
    added = {key for node in theirs for key in _counterparts(alignment, node)}
    attempts = [(ours, [], set()), ([], theirs, own | added), (ours, theirs, added)]
    for node in ours:
        attempts.append(([node], [], own.difference(_uses(users[node], node))))
    # Where values do not say which operand is meant, each that holds the number is tried.
    for node in theirs:
        attempts += [([], [node], own | {key}) for key in _candidates(alignment, node)]
    # A line may stop other operands than PyTorch's does, as in a straight-through estimate.
    missing = [node for node in theirs if own.isdisjoint(_counterparts(alignment, node))]
    for nodes in _by_line(ours):
        kept = own.difference(*(_uses(users[node], node) for node in nodes))
        attempts.append((nodes, [], kept))
        for node in missing:
            attempts += [(nodes, [node], kept | {key}) for key in _candidates(alignment, node)]
    attempts = attempts[:TRIED]
    errors = runs.gradients_with_stops(pair, traced)
    for removed, put, stopped in attempts:
        if not (removed or put):
            continue
        if all(error <= tolerance.GRADIENT for error in errors(stopped).values()):
            uses = _nodes(alignment, stopped - own)
            found = [_hypothesis(node, alignment.torch_of.get(node, ())[-1:]) for node in removed]
            found += [_hypothesis(node, uses) for node in put]
            return list({one.kind: one for one in found}.values())
    return []


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


def _uses(users: list[Node], operand: Node) -> Iterator[tuple[int, int]]:
    for user in users:
        for i, other in enumerate(user.operands):
            if other is operand and user.equation is not None:
                yield id(user.equation), i


def _counterparts(alignment: Alignment, detached: Node) -> Iterator[tuple[int, int]]:
    """Yield the operands of JAX that PyTorch detaches."""
    for user in _computing(alignment, detached):
        for node in alignment.flax_of.get(user, ()):
            for i, operand in enumerate(node.operands):
                same = detached in alignment.torch_of.get(operand, ())
                if same and node.equation is not None:
                    yield id(node.equation), i


def _candidates(alignment: Alignment, detached: Node) -> Iterator[tuple[int, int]]:
    """Yield every operand of JAX that holds a value that PyTorch detaches."""
    for node in alignment.flax_of.get(detached, ()):
        yield from _uses(alignment.flax.users[node], node)


def _computing(alignment: Alignment, node: Node) -> Iterator[Node]:
    """Yield what computes with a value of PyTorch, in whatever layout."""
    for user in alignment.torch.users[node]:
        if user.operation in LAYOUT:
            yield from _computing(alignment, user)
        else:
            yield user


def _nodes(alignment: Alignment, keys: Collection[tuple[int, int]]) -> list[Node]:
    """Return the operations of JAX that take these operands, and the operands."""
    found = []
    for node in alignment.flax.nodes:
        for i, operand in enumerate(node.operands):
            if (id(node.equation), i) in keys:
                found += [node, operand]
    return found


def _hypothesis(node: Node, others: Sequence[Node]) -> Hypothesis:
    """Return the hypothesis of a node that stops the gradient, beside what the other side has."""
    word = node.operation
    ours = word == "stop_gradient"
    there = places(others)
    assert node.place is not None
    here = Side(word, node.place.source, (node.place,))
    beside = Side("", there[0].source if there else "", there)
    module = node.place.module if not ours or not there else there[0].module
    sides = (here, beside) if ours else (beside, here)
    return Hypothesis(module, word, "gradient", *sides)
