"""Find the operations that make the two runs differ: what they return is replaced, and all agrees.

A value of the JAX run is replaced by one of the PyTorch run, and what depends on it runs again.
Where that makes later values agree that did not, both are the same quantity, computed differently:
the difference lies between them and the last values that agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import itemgetter

import numpy as np

from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.trace.align import Alignment, Repair, cone
from flax_attn.parity.trace.candidates import SKIPPED, beyond_layout, candidates
from flax_attn.parity.trace.explain import explain, grouped_by_kind
from flax_attn.parity.trace.hypothesis import Hypothesis
from flax_attn.parity.trace.layouts import laid_out
from flax_attn.parity.trace.numbers import same_array
from flax_attn.parity.trace.program import Node, Program
from flax_attn.parity.trace.repeats import with_repeats

# The operations that run again to see whether a replacement changes anything for the better.
NEXT = 16
# The first replacements that are tried, after which all runs again.
NEAREST = 40
# The replacements that are tried for one that is made, and those that are made.
TRIED, MADE = 1500, 12
# Those that make something agree, of which the best is taken.
COMPARED = 24
# Those that are tried after one that makes something agree.
LOOKED_ON = 24
# Those of one value that are tried where several are found.
ALONE = 400
# The operations that are followed to a value in the layout of a node.
ELEMENTWISE = 8
# Values that agree after a replacement by chance are fewer.
SURE = 3
# The most differences that are looked for once more, with orders told apart.
FEW = 4
# What differs as a whole, or in its order alone.
VAGUE = ("expression", "layout", "operation", "operand")


# A replacement, the values that change by it, and the nodes that are replaced with it.
Made = tuple[Repair, dict[Node, np.ndarray], list[Node]]


@dataclass(frozen=True)
class Search:
    """What was replaced, and whether all outputs agree after it.

    Args:
        hypotheses: what differs where a value was replaced, in the order of the run.
        alignment: values that agree after them.
        wrong: names of the outputs that still differ.
    """

    hypotheses: tuple[Hypothesis, ...]
    alignment: Alignment
    wrong: list[str]


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


def search(flax: Program, torch: Program, expected: Arrays | None = None) -> Search:
    """Return the replacements after which the outputs of two runs agree, as far as there are any.

    Numbers in another order are the same quantity at first, as heads are that are split otherwise.
    Where that names no more than what is at another place, they are another quantity: the sine of
    an angle and its negative hold the same numbers.

    Args:
        flax: run of JAX.
        torch: run of PyTorch, with outputs of the same names.
        expected: the right outputs of JAX; None are those of PyTorch.
    """
    right = {name: node.value for name, node in torch.outputs.items()}
    alignment = Alignment(flax, torch, right if expected is None else expected)
    found = _searched(alignment)
    if found.hypotheses and all(one.parameter not in VAGUE for one in found.hypotheses):
        return found
    # What differs at many places is no matter of one order.
    if len(found.hypotheses) > FEW or not (found.hypotheses or found.wrong):
        return found
    ordered = _searched(replace(alignment, ordered=True))
    few = 0 < len(ordered.hypotheses) <= FEW
    return ordered if few and _rank(ordered) < _rank(found) else found


def _rank(found: Search) -> tuple[int, int, int]:
    """Return how little is said: outputs that still differ, what is vague, and what is written."""
    vague = [one for one in found.hypotheses if one.parameter in VAGUE and not one.note]
    return len(found.wrong), len(vague), _length(found.hypotheses)


def _searched(alignment: Alignment) -> Search:
    first = alignment
    found: list[tuple[int, list[Hypothesis]]] = []
    while len(found) < MADE:
        wrong = alignment.wrong()
        made = _next_repair(alignment, wrong) if wrong else None
        if made is None:
            break
        repair, changed, replaced = made
        # Explained at once, so that the values before it need not be kept.
        found.append((repair.torch.order, explain(repair)))
        alignment = alignment.with_changed(changed, replaced)
    found.sort(key=itemgetter(0))
    every = chain.from_iterable(hypotheses for _, hypotheses in found)
    hypotheses = grouped_by_kind(every)
    if len(hypotheses) > 1:
        alone = _explained_alone(first, hypotheses)
        if alone is not None:
            hypotheses, alignment = alone
    return Search(hypotheses, alignment, alignment.wrong())


def _length(hypotheses: Sequence[Hypothesis]) -> int:
    """Return how much is written to say what differs."""
    return sum(len(one.flax.value) + len(one.torch.value) for one in hypotheses)


def _explained_alone(
    alignment: Alignment, several: Sequence[Hypothesis]
) -> tuple[tuple[Hypothesis, ...], Alignment] | None:
    """Return what differs at one value that makes all outputs agree, if that is less.

    What makes most values agree may do so by chance, where it is given what another one should be.
    """
    wrong = alignment.wrong()
    ours = cone([alignment.flax.outputs[name] for name in wrong], alignment.torch_of)
    theirs = cone([alignment.torch.outputs[name] for name in wrong], alignment.flax_of)
    missing = set(theirs)
    for flax, torch in islice(candidates(alignment, ours, theirs), ALONE):
        found = _tried(alignment, flax, torch, missing)
        if found is None or not found.complete:
            continue
        repair = Repair(flax, torch, alignment, found.changed[flax])
        hypotheses = grouped_by_kind(explain(repair))
        told = all(one.parameter not in ("expression", "layout") for one in hypotheses)
        fewer = len(hypotheses) < len(several) and _length(hypotheses) < _length(several)
        if told and fewer:
            return hypotheses, alignment.with_changed(found.changed)
    return None


def _next_repair(alignment: Alignment, wrong: Sequence[str]) -> Made | None:
    """Return the replacement after which most values agree, with the values that it changes."""
    ours = cone([alignment.flax.outputs[name] for name in wrong], alignment.torch_of)
    theirs = cone([alignment.torch.outputs[name] for name in wrong], alignment.flax_of)
    best: Made | None = None
    most = passed = 0
    certain = False
    left = TRIED
    missing = set(theirs)
    for i, (flax, torch) in enumerate(candidates(alignment, ours, theirs)):
        left -= 1
        found = _tried(alignment, flax, torch, missing, i < NEAREST) if left else None
        if not left or passed == COMPARED:
            break
        if found is None:
            continue
        repair = Repair(flax, torch, alignment, found.changed[flax])
        if found.complete and not certain:
            return repair, *with_repeats(alignment, repair, found.changed)
        passed += 1
        # A few values agree by chance, where the same value in another's place makes more agree.
        same = best is None or flax is best[0].flax or torch is best[0].torch
        if (found.certain, found.gain) > (certain, most) and (same or not certain):
            changed, replaced = found.changed, [flax]
            if found.certain:
                left = min(left, LOOKED_ON)
                changed, replaced = with_repeats(alignment, repair, changed)
            best, most, certain = (repair, changed, replaced), found.gain, found.certain
    return best or _output_repair(alignment, wrong)


def _output_repair(alignment: Alignment, wrong: Sequence[str]) -> Made | None:
    """Return the replacement of an output whose numbers agree, in another order."""
    for name in wrong:
        ours, right = alignment.flax.outputs[name], alignment.expected[name]
        if ours.value.shape == right.shape:
            theirs = alignment.torch.outputs[name]
            return Repair(ours, theirs, alignment, right), {ours: right}, [ours]
    return None


def _tried(
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
