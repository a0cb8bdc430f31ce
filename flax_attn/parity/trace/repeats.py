"""What is computed again, on the same line or in the other steps of a scan, is replaced as well."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from flax_attn.parity.trace.align import Alignment, Repair
from flax_attn.parity.trace.layouts import laid_out
from flax_attn.parity.trace.numbers import same_array
from flax_attn.parity.trace.program import Node
from flax_attn.parity.trace.trials import Changed


def with_repeats(
    alignment: Alignment, repair: Repair, changed: Changed
) -> tuple[Changed, list[Node]]:
    """Return the values that change when what is computed again is replaced as well.

    With them come the nodes that are replaced.

    Args:
        alignment: values that both runs have.
        repair: the replacement of one node.
        changed: the values that change by it alone.
    """
    repeats = _on_line(alignment, repair)
    if len(repeats) > 1:
        changed = alignment.rerun(repeats)
    replaced = repeats
    for steps in _of_steps(alignment, repair):
        every = alignment.rerun(steps)
        fewer = len(alignment.wrong(every)) <= len(alignment.wrong(changed))
        gained = _agreeing(alignment, every, steps)
        if fewer and gained >= _agreeing(alignment, changed, steps):
            changed, replaced = every, steps
    return changed, list(replaced)


def _on_line(alignment: Alignment, repair: Repair) -> Changed:
    """Return the values that repair what a line of source computes several times."""
    own = repair.flax
    current = alignment.value(own)
    repeats = {own: repair.value}
    for node in alignment.flax.nodes:
        if node.line != own.line or node.operation != own.operation:
            continue
        if np.array_equal(alignment.value(node), current):
            repeats[node] = repair.value
    return repeats


def _of_steps(alignment: Alignment, repair: Repair) -> Iterator[Changed]:
    """Yield the values that repair every step of a scan alike, for each way to pair the steps."""
    chosen = _chosen_layout(repair)
    if chosen is None:
        return
    for pairs in _paired_steps(alignment, repair.flax, repair.torch):
        steps = {}
        for flax, torch in pairs:
            layouts = laid_out(torch.value, flax.value.shape)
            steps[flax] = next(islice(layouts, chosen, None))
        yield steps | {repair.flax: repair.value}


def _chosen_layout(repair: Repair) -> int | None:
    """Return which of its layouts the value of PyTorch was replaced in."""
    layouts = laid_out(repair.torch.value, repair.flax.value.shape)
    for i, value in enumerate(layouts):
        if same_array(value, repair.value):
            return i
    return None


def _agreeing(alignment: Alignment, changed: Changed, replaced: Changed) -> int:
    """Return how many values of PyTorch agree with changed ones that were not replaced."""
    found: set[Node] = set()
    for node, value in changed.items():
        if node not in replaced:
            found.update(alignment.matches_array(value))
    return len(found)


def _paired_steps(
    alignment: Alignment, flax: Node, torch: Node
) -> Iterator[list[tuple[Node, Node]]]:
    """Yield what two nodes are in every step of a scan and of the loop in PyTorch."""
    if flax.equation is None:
        return
    ours = [node for node in alignment.flax.nodes if _is_step(node, flax)]
    theirs = [node for node in alignment.torch.nodes if _is_alike(node, torch)]
    times, left = divmod(len(theirs), len(ours))
    if len(ours) == 1 or left or not times:
        return
    own, other = ours.index(flax), theirs.index(torch)
    # The loop may be run several times, and do in each step several times what the scan does once.
    for in_each in range(times, 0, -1):
        if times % in_each:
            continue
        in_one_loop = in_each * len(ours)
        first = other - other % in_one_loop
        steps = theirs[first + other % in_each : first + in_one_loop : in_each]
        # A scan may run from the end.
        for order in (steps, steps[::-1]):
            if order[own] is torch:
                yield list(zip(ours, order, strict=True))


def _is_step(node: Node, other: Node) -> bool:
    """Whether two nodes are the same result of one operation of a scan."""
    same = node.parameters.get("result") == other.parameters.get("result")
    return same and node.equation is other.equation


def _is_alike(node: Node, other: Node) -> bool:
    same = node.operation == other.operation and node.module == other.module
    return same and node.line == other.line and node.value.shape == other.value.shape
