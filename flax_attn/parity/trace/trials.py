"""Put a value of PyTorch in the place of one of JAX, and see what agrees after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from flax_attn.parity.trace.align import Alignment
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


@dataclass(frozen=True)
class Tried:
    """What a replacement makes agree.

    Args:
        gain: how many of the missing values.
        changed: values of JAX that change.
        certain: whether the nodes are certainly the same quantity.
        complete: whether all outputs agree.
    """

    gain: int
    changed: dict[Node, np.ndarray]
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
    users = len(list(beyond_layout(flax, alignment.flax.users)))
    is_output = any(flax is node for node in alignment.flax.outputs.values())
    for value in _layouts(alignment, flax, torch):
        # What is taken apart step by step, as by a scan, is computed with after each step is taken.
        near = alignment.rerun({flax: value}, NEXT * users)
        if not (is_output or whole) and not _agreeing(alignment, near, flax, missing):
            continue
        changed = alignment.rerun({flax: value})
        if _breaks(alignment, flax, changed):
            continue
        agreeing = _agreeing(alignment, changed, flax, missing)
        gain = len(set().union(*agreeing.values()))
        complete = not alignment.wrong(changed)
        if gain or complete:
            together = gain > 1 and _is_certain(alignment, changed, agreeing)
            return Tried(gain, changed, complete or gain >= SURE or together, complete)
    return None


def _breaks(alignment: Alignment, flax: Node, changed: Mapping[Node, np.ndarray]) -> bool:
    """Whether something agrees that is computed with a value that both have, and no longer does."""
    if flax not in alignment.torch_of:
        return False
    for user in beyond_layout(flax, alignment.flax.users):
        agrees = user in alignment.torch_of and alignment.numbers(user).telling
        if agrees and user in changed and not alignment.matches_array(changed[user]):
            return True
    return False


def _layouts(alignment: Alignment, flax: Node, torch: Node) -> Iterator[np.ndarray]:
    """Yield the value of a node of PyTorch in the layouts that that of JAX may have.

    An operation of each element by itself keeps the layout of what it is computed from.
    """
    waiting = [flax]
    for _ in range(ELEMENTWISE):
        if not waiting:
            break
        for ours in waiting.pop(0).operands:
            if ours.value.shape != flax.value.shape:
                continue
            for theirs in alignment.torch_of.get(ours, ()):
                same = theirs.value.shape == torch.value.shape
                if same and same_array(alignment.value(ours), theirs.value):
                    yield torch.value.reshape(flax.value.shape)
                    return
            waiting.append(ours)
    yield from laid_out(torch.value, flax.value.shape)


def _is_certain(
    alignment: Alignment, changed: Mapping[Node, np.ndarray], agreeing: Iterable[Node]
) -> bool:
    """Whether what agrees is computed with other values as well, not of the replaced one alone."""
    for node in agreeing:
        others = [x for x in node.operands if x not in changed and x in alignment.torch_of]
        if any(alignment.numbers(other).telling for other in others):
            return True
    return False


def _agreeing(
    alignment: Alignment, changed: Mapping[Node, np.ndarray], given: Node, missing: set[Node]
) -> dict[Node, set[Node]]:
    """Return the missing nodes of PyTorch that each changed value agrees with, if there are any."""
    found: dict[Node, set[Node]] = {}
    for node, value in changed.items():
        # What has the numbers of the replaced value agrees whatever this is.
        moves = node.operation in SKIPPED or any(
            operand in changed and np.array_equal(changed[operand], value)
            for operand in node.operands
        )
        if node is given or moves:
            continue
        matched = missing.intersection(alignment.matches_array(value))
        if matched:
            found[node] = matched
    return found
