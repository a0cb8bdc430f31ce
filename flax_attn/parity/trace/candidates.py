"""Pairs of nodes, one of each run, that may be the same quantity, computed differently."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from flax_attn.parity.trace.align import Alignment
from flax_attn.parity.trace.expression import common
from flax_attn.parity.trace.numbers import same_array
from flax_attn.parity.trace.patterns import LAYOUT, logsumexp_of, moved_from, summed_in
from flax_attn.parity.trace.program import Node, Program

# The most operations between values that agree and a value that is replaced.
DEEPEST = 40
# The depth of values that both have and JAX or PyTorch computes with: those of PyTorch are tried
# after those of one side.
FLAX_SHARED, TORCH_SHARED = 1, 4
# The most operations of PyTorch that JAX lacks after such a value: after more, what follows may
# agree by chance, as the norms of two layers that take the same value.
LACKED = 3
SKIPPED = frozenset({*LAYOUT, "source", "constant", "element", "slice", "split", "copy"})
# What puts values together, or numbers around them.
JOINED = ("pad", "concat")
Users = Mapping[Node, Sequence[Node]]


def candidates(
    alignment: Alignment, ours: Sequence[Node], theirs: Sequence[Node]
) -> Iterator[tuple[Node, Node]]:
    """Yield pairs of nodes that may be the same quantity, those near to agreeing values first."""
    depths = _depths(ours, alignment.flax) | _depths(theirs, alignment.torch)
    inside = set(depths)
    here = [node for node in ours if _is_candidate(node, depths, alignment.flax.users)]
    there = [node for node in theirs if _is_candidate(node, depths, alignment.torch.users)]
    # One side may compute more with a value that both have.
    used_here = _shared_operands(alignment, ours, alignment.torch_of)
    used_there = _shared_operands(alignment, theirs, alignment.flax_of)
    shared_here = [x for x in used_here if x not in inside and _is_alone(alignment, x)]
    shared_there = [x for x in used_there if x not in inside]
    depths |= dict.fromkeys(shared_here, FLAX_SHARED)
    depths |= dict.fromkeys(shared_there, TORCH_SHARED)
    here += shared_here
    there += shared_there
    shared = {*shared_here, *shared_there}
    quantities = alignment.quantities
    leaves: dict[Node, set[Any]] = {}
    for node in here + there:
        leaves[node] = {quantities.get(leaf, leaf) for leaf in _leaves(node, inside)}
    pairs = []
    for flax, torch in product(here, there):
        if flax.value.size != torch.value.size:
            continue
        if not _may_lack(flax, torch, shared, leaves, quantities):
            continue
        if flax in shared and depths[torch] > LACKED:
            continue
        # What makes a mask or a table is no value of the run.
        if (flax in alignment.flax.varying) != (torch in alignment.torch.varying):
            continue
        depth = depths[flax] + depths[torch]
        alike = common(leaves[flax], leaves[torch])
        pairs.append((depth, flax in shared, -alike, flax.order, flax, torch))
    pairs.sort(key=lambda pair: pair[:4])
    for *_, flax, torch in pairs:
        yield flax, torch


def _may_lack(
    flax: Node,
    torch: Node,
    shared: Collection[Node],
    leaves: Mapping[Node, set[Any]],
    quantities: Mapping[Node, int],
) -> bool:
    """Whether one of two nodes is computed from the other, if that is a value that both have."""
    if flax in shared:
        return torch not in shared and quantities[flax] in leaves[torch]
    return torch not in shared or quantities[torch] in leaves[flax]


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
    """Return what a node has in another order of axes, or with other bounds between them."""
    if node.operation not in LAYOUT:
        return node
    origin = moved_from(node)
    sizes, others = (sorted(np.squeeze(x.value).shape) for x in (node, origin))
    if sizes == others:
        return origin
    same = node.value.size == origin.value.size
    return origin if same and same_array(node.value.ravel(), origin.value.ravel()) else node


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


def is_shift(node: Node, users: Users) -> bool:
    """Whether a value is only subtracted in an `exp`, as a softmax does, which changes nothing."""
    for user in users[node]:
        moves = user.operation in LAYOUT or user.operation == "max"
        if moves and is_shift(user, users):
            continue
        if user.operation != "sub" or user.operands[1] is not node:
            return False
        if any(after.operation != "exp" for after in users[user]):
            return False
    return bool(users[node])


def _is_in_softmax(node: Node, users: Users) -> bool:
    """Whether a value is a step of a softmax before its end, or of several that divide by a sum."""
    after = list(beyond_layout(node, users))
    if node.operation == "exp":
        operations = [user.operation for user in after]
        # The exponentials are summed once, and divided by their sum.
        if operations.count("sum") != 1 or not {"sum", "div"}.issuperset(operations):
            return False
        return _is_in_softmax(after[operations.index("sum")], users)
    if node.operation == "sum":
        return bool(after) and all(map(_ends_sum, after))
    if node.operation == "log":
        return summed_in(node) is not None and any(map(logsumexp_of, after))
    if node.operation == "sub" and is_shift(node.operands[1], users):
        return all(_is_in_softmax(user, users) for user in after)
    return False


def _ends_sum(user: Node) -> bool:
    return user.operation == "div" or summed_in(user) is not None


def beyond_layout(node: Node, users: Users) -> Iterator[Node]:
    """Yield what computes with a node, in whatever layout."""
    for user in users[node]:
        if user.operation in LAYOUT:
            yield from beyond_layout(user, users)
        else:
            yield user


def _is_candidate(node: Node, depths: Mapping[Node, int], users: Users) -> bool:
    if not node.floating or not node.operands or depths[node] > DEEPEST:
        return False
    # What moves a value that differs is right once that value is.
    moves_another = any(operand in depths for operand in node.operands)
    if node.operation in SKIPPED and moves_another and not _is_cut(node, depths):
        return False
    return not is_shift(node, users) and not _is_in_softmax(node, users)


def _is_cut(node: Node, depths: Collection[Node]) -> bool:
    """Whether a node is a part of what is put together from values that agree.

    The whole, as what is padded on one side before it is cut off on the other, may have another
    size than its counterpart.
    """
    if node.operation != "slice":
        return False
    (whole,) = node.operands
    return whole.operation in JOINED and not any(operand in depths for operand in whole.operands)


def _depths(nodes: Sequence[Node], program: Program) -> dict[Node, int]:
    """Return how many operations lie between values that agree and each node."""
    found: dict[Node, int] = {}
    for node in nodes:
        before = [found.get(operand, 0) for operand in node.operands]
        found[node] = max(before, default=0)
        # What makes a mask or a table is one step, however long it is.
        computes = node.operation not in LAYOUT and node in program.varying
        if computes and not _is_in_softmax(node, program.users):
            found[node] += 1
    return found
