"""Find the operations that make the two runs differ: what they return is replaced, and all agrees.

A value of the JAX run is replaced by one of the PyTorch run, and what depends on it runs again.
Where that makes later values agree that did not, both are the same quantity, computed differently:
the difference lies between them and the last values that agree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter
from typing import Any

import numpy as np

from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.trace.align import Alignment, Repair, cone, same_array
from flax_attn.parity.trace.explain import explain, grouped_by_kind
from flax_attn.parity.trace.expression import LAYOUT, moved_from
from flax_attn.parity.trace.hypothesis import Hypothesis
from flax_attn.parity.trace.layouts import laid_out
from flax_attn.parity.trace.program import Node, Program

# The most operations between values that agree and a value that is replaced.
DEEPEST = 40
# The operations that run again to see whether a replacement changes anything for the better.
NEXT = 16
# The replacements that are tried for one that is made, and those that are made.
TRIED, MADE = 1500, 12
# Those that make something agree, of which the best is taken.
COMPARED = 24
# Those that are tried after one that makes something agree.
LOOKED_ON = 24
# Those of one value that are tried where several are found.
ALONE = 400
# The depth of values that both have and JAX or PyTorch computes with: those of PyTorch are tried
# after those of one side.
FLAX_SHARED, TORCH_SHARED = 1, 4
# The most operations of PyTorch that JAX lacks after such a value: after more, what follows may
# agree by chance, as the norms of two layers that take the same value.
LACKED = 3
# The operations that are followed to a value in the layout of a node.
ELEMENTWISE = 8
# Values that agree after a replacement by chance are fewer.
SURE = 3
SKIPPED = frozenset({*LAYOUT, "source", "constant", "element", "slice", "split", "copy"})


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

    Args:
        flax: run of JAX.
        torch: run of PyTorch, with outputs of the same names.
        expected: the right outputs of JAX; None are those of PyTorch.
    """
    right = {name: node.value for name, node in torch.outputs.items()}
    first = alignment = Alignment(flax, torch, right if expected is None else expected)
    found: list[tuple[int, list[Hypothesis]]] = []
    while len(found) < MADE:
        wrong = wrong_outputs(alignment)
        made = _next_repair(alignment, wrong) if wrong else None
        if made is None:
            break
        repair, changed = made
        # Explained at once, so that the values before it need not be kept.
        found.append((repair.torch.order, explain(repair)))
        alignment = alignment.with_changed(changed)
    found.sort(key=itemgetter(0))
    every = chain.from_iterable(hypotheses for _, hypotheses in found)
    hypotheses = grouped_by_kind(every)
    if len(hypotheses) > 1:
        alone = _explained_alone(first, hypotheses)
        if alone is not None:
            hypotheses, alignment = alone
    return Search(hypotheses, alignment, wrong_outputs(alignment))


def _length(hypotheses: Sequence[Hypothesis]) -> int:
    """Return how much is written to say what differs."""
    return sum(len(one.flax.value) + len(one.torch.value) for one in hypotheses)


def _explained_alone(
    alignment: Alignment, several: Sequence[Hypothesis]
) -> tuple[tuple[Hypothesis, ...], Alignment] | None:
    """Return what differs at one value that makes all outputs agree, if that is less.

    What makes most values agree may do so by chance, where it is given what another one should be.
    """
    wrong = wrong_outputs(alignment)
    ours = cone([alignment.flax.outputs[name] for name in wrong], alignment.torch_of)
    theirs = cone([alignment.torch.outputs[name] for name in wrong], alignment.flax_of)
    missing = set(theirs)
    for flax, torch in islice(_candidates(alignment, ours, theirs), ALONE):
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


def wrong_outputs(alignment: Alignment) -> list[str]:
    """Return the names of the outputs that differ."""
    found = []
    for name, node in alignment.flax.outputs.items():
        if not same_array(alignment.value(node), alignment.expected[name]):
            found.append(name)
    return found


def _next_repair(
    alignment: Alignment, wrong: Sequence[str]
) -> tuple[Repair, dict[Node, np.ndarray]] | None:
    """Return the replacement after which most values agree, with the values that it changes."""
    ours = cone([alignment.flax.outputs[name] for name in wrong], alignment.torch_of)
    theirs = cone([alignment.torch.outputs[name] for name in wrong], alignment.flax_of)
    best: tuple[Repair, dict[Node, np.ndarray]] | None = None
    most = passed = 0
    certain = False
    left = TRIED
    missing = set(theirs)
    for flax, torch in _candidates(alignment, ours, theirs):
        left -= 1
        found = _tried(alignment, flax, torch, missing) if left else None
        if not left or passed == COMPARED:
            break
        if found is None:
            continue
        repair = Repair(flax, torch, alignment, found.changed[flax])
        if found.complete and not certain:
            return repair, _with_repeats(alignment, repair, found.changed)
        passed += 1
        # A few values agree by chance, where the same value in another's place makes more agree.
        same = best is None or flax is best[0].flax or torch is best[0].torch
        if (found.certain, found.gain) > (certain, most) and (same or not certain):
            changed = found.changed
            if found.certain:
                left = min(left, LOOKED_ON)
                changed = _with_repeats(alignment, repair, changed)
            best, most, certain = (repair, changed), found.gain, found.certain
    return best or _output_repair(alignment, wrong)


def _with_repeats(
    alignment: Alignment, repair: Repair, changed: dict[Node, np.ndarray]
) -> dict[Node, np.ndarray]:
    """Return the values that change when what the same line computes again is replaced as well."""
    own = repair.flax
    current = alignment.value(own)
    repeats = {own: repair.value}
    for node in alignment.flax.nodes:
        same = _line(node) == _line(own) and node.operation == own.operation
        if node is own or not same:
            continue
        value = alignment.value(node)
        if value.shape == current.shape and np.array_equal(value, current):
            repeats[node] = repair.value
    if len(repeats) == 1:
        return changed
    return alignment.flax.rerun(repeats, alignment.changed)


def _line(node: Node) -> tuple[str, int] | None:
    return None if node.place is None else (node.place.file, node.place.line)


def _output_repair(
    alignment: Alignment, wrong: Sequence[str]
) -> tuple[Repair, dict[Node, np.ndarray]] | None:
    """Return the replacement of an output whose numbers agree, in another order."""
    for name in wrong:
        ours, right = alignment.flax.outputs[name], alignment.expected[name]
        if ours.value.shape == right.shape:
            theirs = alignment.torch.outputs[name]
            return Repair(ours, theirs, alignment, right), {ours: right}
    return None


def _candidates(
    alignment: Alignment, ours: Sequence[Node], theirs: Sequence[Node]
) -> Iterator[tuple[Node, Node]]:
    """Yield pairs of nodes that may be the same quantity, those near to agreeing values first."""
    depths = _depths(ours, alignment.flax) | _depths(theirs, alignment.torch)
    here = [node for node in ours if _is_candidate(node, depths, alignment.flax.users)]
    there = [node for node in theirs if _is_candidate(node, depths, alignment.torch.users)]
    inside = set(depths)
    # One side may compute more with a value that both have.
    shared_here = _shared_operands(alignment, ours, alignment.torch_of)
    shared_here = [node for node in shared_here if _is_alone(alignment, node)]
    shared_there = _shared_operands(alignment, theirs, alignment.flax_of)
    depths = dict.fromkeys(shared_there, TORCH_SHARED) | depths
    depths = dict.fromkeys(shared_here, FLAX_SHARED) | depths
    here += shared_here
    there += shared_there
    both = {*shared_here, *shared_there}
    quantities = alignment.quantities
    leaves: dict[Node, set[Any]] = {}
    for node in [*here, *there]:
        leaves[node] = {quantities.get(leaf, leaf) for leaf in _leaves(node, inside)}
    pairs = []
    for flax in here:
        for torch in there:
            if flax.value.size != torch.value.size:
                continue
            if not _may_lack(flax, torch, both, leaves, quantities):
                continue
            if flax in both and depths[torch] > LACKED:
                continue
            # What makes a mask or a table is no value of the run.
            if (flax in alignment.flax.varying) != (torch in alignment.torch.varying):
                continue
            every = leaves[flax] | leaves[torch]
            common = len(leaves[flax] & leaves[torch]) / max(len(every), 1)
            pairs.append((depths[flax] + depths[torch], -common, flax.order, flax, torch))
    pairs.sort(key=lambda pair: pair[:3])
    for *_, flax, torch in pairs:
        yield flax, torch


def _may_lack(
    flax: Node,
    torch: Node,
    both: Collection[Node],
    leaves: Mapping[Node, set[Any]],
    quantities: Mapping[Node, int],
) -> bool:
    """Whether one of two nodes is computed from the other, if that is a value that both have."""
    if flax in both:
        return torch not in both and quantities[flax] in leaves[torch]
    return torch not in both or quantities[torch] in leaves[flax]


def _shared_operands(
    alignment: Alignment,
    nodes: Sequence[Node],
    matched: Mapping[Node, Sequence[Node]],
) -> list[Node]:
    """Return the values that both have and one side computes with."""
    found: dict[Node, None] = {}
    for node in nodes:
        for operand in map(_untransposed, node.operands):
            shared = operand in matched and operand.operation not in SKIPPED
            if shared and operand.floating and alignment.numbers(operand).telling:
                found[operand] = None
    return list(found)


def _untransposed(node: Node) -> Node:
    """Return what a node has in another order of axes, none of them split or joined."""
    origin = moved_from(node)
    sizes = [sorted(np.squeeze(x.value).shape) for x in (node, origin)]
    return origin if node.operation in LAYOUT and sizes[0] == sizes[1] else node


def _is_alone(alignment: Alignment, node: Node) -> bool:
    """Whether no other value of JAX happens to be equal, so that it is known which is meant."""
    equal: set[Node] = set()
    for other in alignment.torch_of[node]:
        equal.update(alignment.flax_of[other])
    return len({moved_from(one) for one in equal}) == 1


def _leaves(node: Node, inside: Collection[Node]) -> set[Node]:
    """Return the values that agree from which a node is computed."""
    found: set[Node] = set()
    waiting = [node]
    seen: set[Node] = set()
    while waiting:
        for operand in waiting.pop().operands:
            if operand not in inside:
                found.add(operand)
            elif operand not in seen:
                seen.add(operand)
                waiting.append(operand)
    return found


def _is_shift(node: Node, users: Mapping[Node, Sequence[Node]]) -> bool:
    """Whether a value is only subtracted in an `exp`, as a softmax does, which changes nothing."""
    for user in users[node]:
        moved = user.operation in LAYOUT or user.operation == "max"
        if moved and _is_shift(user, users):
            continue
        shifted = user.operation == "sub" and user.operands[1] is node
        if not shifted or any(after.operation != "exp" for after in users[user]):
            return False
    return bool(users[node])


def _is_in_softmax(node: Node, users: Mapping[Node, Sequence[Node]]) -> bool:
    """Whether a value is a step of a softmax before its end, or of several that divide by a sum."""
    after = list(_beyond_layout(node, users))
    if node.operation == "exp":
        summed = [user for user in after if user.operation == "sum"]
        divided = [user for user in after if user.operation == "div" and user not in summed]
        whole = len(summed) == 1 and len(summed) + len(divided) == len(after)
        return whole and all(_is_in_softmax(one, users) for one in summed)
    if node.operation == "sum":
        return bool(after) and all(user.operation == "div" for user in after)
    shifts = node.operation == "sub" and _is_shift(node.operands[1], users)
    return shifts and all(_is_in_softmax(user, users) for user in after)


def _beyond_layout(node: Node, users: Mapping[Node, Sequence[Node]]) -> Iterator[Node]:
    for user in users[node]:
        if user.operation in LAYOUT:
            yield from _beyond_layout(user, users)
        else:
            yield user


def _is_candidate(
    node: Node, depths: dict[Node, int], users: Mapping[Node, Sequence[Node]]
) -> bool:
    shown = node.operation not in SKIPPED or not any(x in depths for x in node.operands)
    if not (node.floating and shown and node.operands and depths[node] <= DEEPEST):
        return False
    return not (_is_shift(node, users) or _is_in_softmax(node, users))


def _depths(nodes: Sequence[Node], program: Program) -> dict[Node, int]:
    """Return how many operations lie between values that agree and each node."""
    found: dict[Node, int] = {}
    for node in nodes:
        inner = [found[operand] for operand in node.operands if operand in found]
        # What makes a mask or a table is one step, however long it is.
        moves = node.operation in LAYOUT or node not in program.varying
        own = 0 if moves else 1
        found[node] = max(inner, default=0) + own
    return found


def _tried(alignment: Alignment, flax: Node, torch: Node, missing: set[Node]) -> Tried | None:
    """Return what a replacement makes agree, in the layout in which it does; None if nothing."""
    known = alignment.changed
    users = len(list(_beyond_layout(flax, alignment.flax.users)))
    is_output = any(flax is node for node in alignment.flax.outputs.values())
    for value in _layouts(alignment, flax, torch):
        # What is taken apart step by step, as by a scan, is computed with after each step is taken.
        near = alignment.flax.rerun({flax: value}, known, NEXT * users)
        if not is_output and not _agreeing(alignment, near, flax, missing):
            continue
        changed = alignment.flax.rerun({flax: value}, known)
        agreeing = _agreeing(alignment, changed, flax, missing)
        gain = len(set().union(*agreeing.values()))
        complete = all(
            same_array(changed.get(node, alignment.value(node)), alignment.expected[name])
            for name, node in alignment.flax.outputs.items()
        )
        if gain or complete:
            together = gain > 1 and _is_certain(alignment, changed, agreeing)
            return Tried(gain, changed, complete or gain >= SURE or together, complete)
    return None


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
