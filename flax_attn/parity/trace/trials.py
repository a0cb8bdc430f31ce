"""Put a value of PyTorch in the place of one of JAX, and see what agrees after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from flax_attn.parity.trace.align import Alignment, Repair, Values, cone
from flax_attn.parity.trace.candidates import SKIPPED, beyond_layout
from flax_attn.parity.trace.layouts import laid_out
from flax_attn.parity.trace.numbers import same_array
from flax_attn.parity.trace.program import Node

# The operations that run again to see whether a replacement changes anything for the better.
NEXT = 16
# The operations that are followed to a value in the layout of a node.
ELEMENTWISE = 8
# Values that agree after a replacement by chance are fewer.
SURE = 3
# The layouts that are tried after one in which something agrees.
OTHER_LAYOUTS = 3
# Values of JAX that change where some are replaced, those included.
Changed = dict[Node, np.ndarray]


@dataclass(frozen=True)
class Tried:
    """What a replacement makes agree.

    Args:
        repair: the replacement.
        gain: how many of the missing values.
        changed: values of JAX that change.
        certain: whether the nodes are certainly the same quantity.
        complete: whether all outputs agree.
    """

    repair: Repair
    gain: int
    changed: Changed
    certain: bool
    complete: bool


def tried(
    alignment: Alignment, flax: Node, torch: Node, missing: set[Node], whole: bool = False
) -> Tried | None:
    """Return what a replacement makes agree, in the layout in which it does; None if nothing.

    Args:
        alignment: values that both runs have.
        flax: node that is replaced.
        torch: node whose value replaces it.
        missing: nodes of PyTorch that JAX does not have.
        whole: whether all runs again, though nothing agrees soon after the node.
    """
    if alignment.budget.spent:
        return None
    # What has the numbers of the value that replaces it says nothing of it.
    others = missing - {torch}
    best: Tried | None = None
    left = None
    for value in _layouts(alignment, flax, torch):
        if left == 0:
            break
        found = _tried_in_layout(alignment, Repair(flax, torch, alignment, value), others, whole)
        if found is not None and found.complete:
            return found
        if found is not None and (best is None or found.gain > best.gain):
            best = found
        # Heads and groups of one size can be told apart by what agrees in the end.
        if best is not None:
            left = OTHER_LAYOUTS if left is None else left - 1
    return best


def _tried_in_layout(
    alignment: Alignment, repair: Repair, missing: set[Node], whole: bool
) -> Tried | None:
    """Return what a replacement makes agree in one layout; None if nothing."""
    flax, value = repair.flax, repair.value
    if not whole and flax not in alignment.flax.outputs.values():
        users = list(beyond_layout(flax, alignment.flax.users))
        # What is taken apart step by step, as by a scan, is computed with after each step is taken.
        near = alignment.rerun({flax: value}, NEXT * len(users))
        if not _agreeing(alignment, near, flax, missing):
            return None
    changed = alignment.rerun({flax: value})
    if _breaks(alignment, flax, changed):
        return None
    agreeing = _agreeing(alignment, changed, flax, missing)
    gain = len(set().union(*agreeing.values()))
    complete = not alignment.wrong(changed)
    if not gain and not complete:
        return None
    together = gain > 1 and _is_certain(alignment, changed, flax, agreeing)
    certain = complete or gain >= SURE or together
    return Tried(repair, gain, changed, certain, complete)


def _breaks(alignment: Alignment, flax: Node, changed: Values) -> bool:
    """Whether something agrees that is computed with a value that both have, and no longer does."""
    if flax not in alignment.torch_of:
        return False
    for user in beyond_layout(flax, alignment.flax.users):
        agreed = user in alignment.torch_of and alignment.numbers(user).telling
        if agreed and user in changed and not alignment.matches_array(changed[user]):
            return True
    return False


def _layouts(alignment: Alignment, flax: Node, torch: Node) -> Iterator[np.ndarray]:
    """Yield the value of a node of PyTorch in the layouts that that of JAX may have."""
    shape = flax.value.shape
    if _keeps_layout(alignment, flax, torch.value.shape):
        yield torch.value.reshape(shape)
    else:
        yield from laid_out(torch.value, shape)


def _keeps_layout(alignment: Alignment, flax: Node, there: tuple[int, ...]) -> bool:
    """Whether a node is computed element by element from what has one layout on both sides.

    Args:
        alignment: values that both runs have.
        flax: node of JAX.
        there: shape of its counterpart in PyTorch, and of what that is computed from.
    """
    waiting = [flax]
    for _ in range(ELEMENTWISE):
        if not waiting:
            break
        operands = waiting.pop(0).operands
        inner = [one for one in operands if one.value.shape == flax.value.shape]
        for ours in inner:
            value = alignment.value(ours)
            others = [theirs.value for theirs in alignment.torch_of.get(ours, ())]
            if any(other.shape == there and same_array(value, other) for other in others):
                return True
        waiting += inner
    return False


def _is_certain(
    alignment: Alignment, changed: Values, given: Node, agreeing: Iterable[Node]
) -> bool:
    """Whether what agrees is computed with other values as well, not of the replaced one alone."""
    after = changed.keys() - {given}
    before = set(alignment.flax.nodes) - after
    for node in cone(agreeing, before):
        others = [x for x in node.operands if x not in changed and x in alignment.torch_of]
        if any(alignment.numbers(other).telling for other in others):
            return True
    return False


def _agreeing(
    alignment: Alignment, changed: Values, given: Node, missing: set[Node]
) -> dict[Node, set[Node]]:
    """Return the missing nodes of PyTorch that each changed value agrees with, if there are any."""
    found: dict[Node, set[Node]] = {}
    for node, value in changed.items():
        # What has the numbers of the replaced value agrees whatever this is.
        if node is given or _moves(node, changed):
            continue
        matched = missing.intersection(alignment.matches_array(value))
        if matched:
            found[node] = matched
    return found


def _moves(node: Node, changed: Values) -> bool:
    """Whether a node has the numbers of an operand that changes."""
    if node.operation in SKIPPED:
        return True
    operands = [changed[operand] for operand in node.operands if operand in changed]
    return any(np.array_equal(operand, changed[node]) for operand in operands)
