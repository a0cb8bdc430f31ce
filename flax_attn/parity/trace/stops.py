"""Gradients that one side stops and the other does not, where the outputs agree."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from flax_attn.parity import tolerance
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace import runs
from flax_attn.parity.trace.align import Alignment
from flax_attn.parity.trace.hypothesis import Hypothesis, Side
from flax_attn.parity.trace.patterns import LAYOUT
from flax_attn.parity.trace.program import Node

# The ways to stop gradients that are tried.
TRIED = 24


def stopped_gradients(pair: Pair, traced: object, alignment: Alignment) -> list[Hypothesis]:
    """Return what stops gradients on one side alone, if that is the whole difference.

    The gradients of JAX are computed again without its `stop_gradient`, or with one where PyTorch
    detaches, or both: the first that makes all gradients agree is the difference.

    Args:
        pair: pair of modules whose outputs agree.
        traced: jaxpr of the JAX side.
        alignment: values that both runs have.
    """
    ours = [node for node in alignment.flax.nodes if _is_stop(node, "stop_gradient")]
    theirs = [node for node in alignment.torch.nodes if _is_stop(node, "detach")]
    own = {key for node in ours for key in _uses(alignment.flax.users[node], node)}
    added = {key for node in theirs for key in _counterparts(alignment, node)}
    attempts = [(ours, [], set()), ([], theirs, own | added), (ours, theirs, added)]
    # Where values do not say which operand is meant, each that holds the number is tried.
    for node in theirs:
        attempts += [([], [node], own | {key}) for key in _candidates(alignment, node)]
    attempts = attempts[:TRIED]
    errors = runs.gradients_with_stops(pair, traced)
    for removed, put, stopped in attempts:
        if not (removed or put):
            continue
        if all(error <= tolerance.GRADIENT for error in errors(stopped).values()):
            uses = _nodes(alignment, stopped - own)
            found = [_hypothesis(node, alignment.torch_of.get(node, ())) for node in removed]
            found += [_hypothesis(node, uses) for node in put]
            return list({one.kind: one for one in found}.values())
    return []


def _is_stop(node: Node, operation: str) -> bool:
    # The softmax of JAX stops the gradient of its maximum, which has none.
    return node.operation == operation and node.place is not None and operation in node.place.source


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
    """Return these operands of JAX, or the operations that they are given to, if these are."""
    found = []
    for node in alignment.flax.nodes:
        for i, operand in enumerate(node.operands):
            if (id(node.equation), i) in keys:
                found.append(operand if operand.place is not None else node)
    return found


def _hypothesis(node: Node, others: Sequence[Node]) -> Hypothesis:
    """Return the hypothesis of a node that stops the gradient, beside what the other side has."""
    word = node.operation
    ours = word == "stop_gradient"
    places = tuple(other.place for other in others[-1:] if other.place is not None)
    assert node.place is not None
    here = Side(word, node.place.source, (node.place,))
    there = Side("", places[0].source if places else "", places)
    module = node.place.module if not ours or not places else places[0].module
    sides = (here, there) if ours else (there, here)
    return Hypothesis(module, word, "gradient", *sides)
