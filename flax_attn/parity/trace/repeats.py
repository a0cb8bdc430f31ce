"""What is computed again, on the same line or in the other steps of a scan, is replaced as well."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice

import numpy as np

from flax_attn.parity.trace.align import Alignment, Repair
from flax_attn.parity.trace.layouts import laid_out
from flax_attn.parity.trace.numbers import same_array
from flax_attn.parity.trace.program import Node


def with_repeats(
    alignment: Alignment, repair: Repair, changed: dict[Node, np.ndarray]
) -> tuple[dict[Node, np.ndarray], list[Node]]:
    """Return the values that change when what is computed again is replaced as well.

    With them come the nodes that are replaced.

    Args:
        alignment: values that both runs have.
        repair: the replacement of one node.
        changed: the values that change by it alone.
    """
    own = repair.flax
    current = alignment.value(own)
    repeats = {own: repair.value}
    for node in alignment.flax.nodes:
        same = node.line == own.line and node.operation == own.operation
        if node is own or not same:
            continue
        value = alignment.value(node)
        if value.shape == current.shape and np.array_equal(value, current):
            repeats[node] = repair.value
    if len(repeats) > 1:
        changed = alignment.rerun(repeats)
    steps = _of_steps(alignment, repair)
    if not steps:
        return changed, [*repeats]
    every = alignment.rerun(steps)
    fewer = len(alignment.wrong(every)) <= len(alignment.wrong(changed))
    gained = [_agreeing(alignment, found, steps) for found in (changed, every)]
    return (every, [*steps]) if fewer and gained[1] >= gained[0] else (changed, [*repeats])


def _of_steps(alignment: Alignment, repair: Repair) -> dict[Node, np.ndarray]:
    """Return the values that repair every step of a scan alike; none if there is one step."""
    pairs = _other_steps(alignment, repair.flax, repair.torch)
    layouts = laid_out(repair.torch.value, repair.flax.value.shape)
    chosen = next((i for i, value in enumerate(layouts) if same_array(value, repair.value)), None)
    if not pairs or chosen is None:
        return {}
    steps = {repair.flax: repair.value}
    for flax, torch in pairs:
        steps[flax] = next(islice(laid_out(torch.value, flax.value.shape), chosen, None))
    return steps


def _agreeing(
    alignment: Alignment, changed: Mapping[Node, np.ndarray], replaced: Collection[Node]
) -> int:
    """Return how many values of PyTorch agree with changed ones that were not replaced."""
    found: set[Node] = set()
    for node, value in changed.items():
        if node not in replaced:
            found.update(alignment.matches_array(value))
    return len(found)


def _other_steps(alignment: Alignment, flax: Node, torch: Node) -> list[tuple[Node, Node]]:
    """Return what two nodes are in the other steps of a scan and of the loop in PyTorch."""
    if flax.equation is None:
        return []
    index = flax.parameters.get("result")
    ours = [
        node
        for node in alignment.flax.nodes
        if node.equation is flax.equation and node.parameters.get("result") == index
    ]
    theirs = [node for node in alignment.torch.nodes if _is_alike(node, torch)]
    each, left = divmod(len(theirs), len(ours))
    if len(ours) == 1 or left or not each:
        return []
    step, place = divmod(theirs.index(torch), each)
    # A scan may run from the end.
    mirrored = ours.index(flax) != step
    if mirrored and ours.index(flax) != len(ours) - 1 - step:
        return []
    steps = theirs[place::each]
    pairs = zip(ours, reversed(steps) if mirrored else steps, strict=True)
    return [(one, other) for one, other in pairs if one is not flax]


def _is_alike(node: Node, other: Node) -> bool:
    same = node.operation == other.operation and node.module == other.module
    return same and node.line == other.line and node.value.shape == other.value.shape
