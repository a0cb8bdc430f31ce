"""Numbers that both sides have, at other places: which operation moves them, and how."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, permutations

import numpy as np

from flax_attn.parity.trace.align import Alignment, cone
from flax_attn.parity.trace.layouts import laid_out
from flax_attn.parity.trace.notation import plain
from flax_attn.parity.trace.numbers import LAYOUTS, same_array
from flax_attn.parity.trace.patterns import LAYOUT
from flax_attn.parity.trace.program import Node, Program

# Operations that move numbers and compute none.
MOVING = frozenset(
    {*LAYOUT, "slice", "split", "element", "concat", "stack", "flip", "roll", "gather", "copy"}
)
# Those of them that change no order.
STILL = frozenset({"broadcast", "squeeze", "expand_dims", "view", "copy", "stop_gradient"})
# Those of them that change an order, whatever comes after them.
TURNING = ("transpose", "flip", "roll")
# The values that are tried in another layout.
ANCESTORS = 80
# The most axes and the longest axis whose order is described.
AXES, LONGEST = 5, 12


def narrowed(
    alignment: Alignment, top: Node, expected: np.ndarray
) -> tuple[Node, Node, np.ndarray] | None:
    """Return the first value whose order is wrong: in that of PyTorch, it makes `top` right.

    A value that makes all outputs right comes before one that makes `top` right alone, as a kernel
    may take the order of the pixels. With it comes the node of PyTorch that has the right order,
    and the value in that order.

    Args:
        alignment: values that both runs have.
        top: node of the JAX run whose value is wrong.
        expected: its right value.
    """
    first = None
    misshapen = _misshapen(alignment)
    for node, other, value in _reordered(alignment, top):
        changed = alignment.rerun({node: value})
        if not alignment.wrong(changed):
            return node, other, value
        # An output of another shape is not made right by the order of a parameter.
        possible = node.operands or not misshapen
        right = top in changed and same_array(changed[top], expected)
        if first is None and possible and right:
            first = node, other, value
    return first


def _reordered(alignment: Alignment, top: Node) -> Iterator[tuple[Node, Node, np.ndarray]]:
    """Yield the values before a node whose order may be wrong, each in the orders of PyTorch."""
    for node in sorted(ancestors(top), key=lambda node: node.order):
        shared = node in alignment.torch_of and alignment.numbers(node).telling
        if shared and not _anchored(alignment, node, ours=True):
            for other, value in _orders(alignment, node):
                yield node, other, value


def _misshapen(alignment: Alignment) -> bool:
    """Whether an output has another shape than it should have."""
    for name, node in alignment.flax.outputs.items():
        own, expected = alignment.value(node), alignment.expected[name]
        if np.squeeze(own).shape != np.squeeze(expected).shape:
            return True
    return False


def _orders(alignment: Alignment, node: Node) -> Iterator[tuple[Node, np.ndarray]]:
    """Yield the nodes of PyTorch that hold the numbers of a node, and these in another order."""
    current = alignment.value(node)
    # The last that moves the numbers is nearest to what computes with them.
    for other in reversed(alignment.torch_of[node]):
        for value in islice(laid_out(other.value, current.shape), LAYOUTS):
            if not same_array(value, current):
                yield other, value


def last_move(program: Program, node: Node) -> Node:
    """Return the last of the operations that move the numbers of a node, one after the other."""
    while len(program.users[node]) == 1:
        (user,) = program.users[node]
        if user.operation not in MOVING - STILL:
            break
        node = user
    return node


def ancestors(top: Node) -> set[Node]:
    """Return the nearest values that a node depends on."""
    found: set[Node] = set()
    waiting = [top]
    while waiting and len(found) < ANCESTORS:
        node = waiting.pop(0)
        for operand in node.operands:
            if operand.operation == "constant" or operand in found:
                continue
            found.add(operand)
            waiting.append(operand)
    return found


def turns(top: Node) -> list[Node]:
    """Return the operations that change an order on the way from the inputs to a node."""
    return [node for node in cone([top], {}) if node.operation in TURNING]


def steps(alignment: Alignment, top: Node, ours: bool) -> list[Node]:
    """Return the operations that move numbers between a node and values in a common order."""
    found = {top}
    waiting = list(top.operands)
    while waiting:
        node = waiting.pop()
        if node in found or _anchored(alignment, node, ours):
            continue
        found.add(node)
        waiting += node.operands
    moving = [node for node in found if node.operation in MOVING]
    return sorted(moving, key=lambda node: node.order)


def _anchored(alignment: Alignment, node: Node, ours: bool) -> bool:
    """Whether the other side has a value in the same order, except for the order of its axes."""
    # Equal numbers have every order; what is moved says nothing of what moves it.
    if node.constant or node.operation in MOVING:
        return node.constant
    counterparts = alignment.torch_of if ours else alignment.flax_of
    value = alignment.value(node)
    return any(_in_order(value, alignment.value(other)) for other in counterparts.get(node, ()))


def _in_order(value: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays hold the same in the same order, except for the order of their axes."""
    if other.size == value.size and same_array(other.reshape(-1), value.reshape(-1)):
        return True
    sizes = np.squeeze(value).shape
    # Where two axes are as long as each other, their order can be wrong.
    if np.squeeze(other).ndim != len(sizes) or len(set(sizes)) != len(sizes):
        return False
    return any(same_array(moved, value) for moved in laid_out(other, value.shape))


def shown(nodes: Sequence[Node]) -> str:
    """Return operations that move numbers in plain notation, without those that keep the order."""
    kept = [node for node in nodes if node.operation not in STILL] or list(nodes)
    return ", then ".join(_shown(node) for node in kept)


def _shown(node: Node) -> str:
    return f"{node.operation} {' '.join(_parameters(node))}".strip()


def _parameters(node: Node) -> list[str]:
    given = node.parameters
    if node.operation == "slice" and isinstance(given.get("start"), tuple):
        return [_bounds(node)]
    # What these take needs no name.
    if node.operation in ("reshape", "transpose"):
        return [plain(value) for value in given.values()]
    return [f"{name}={plain(value)}" for name, value in given.items()]


def _bounds(node: Node) -> str:
    starts, stops = node.parameters["start"], node.parameters["stop"]
    shown = []
    for start, stop, size in zip(starts, stops, node.operands[0].value.shape, strict=True):
        shown.append(":" if (start, stop) == (0, size) else f"{start}:{stop}")
    return f"[{', '.join(shown)}]"


def relation(flax: np.ndarray, torch: np.ndarray) -> str:
    """Return in words how the order of one array differs from that of another of its shape.

    Example:
        >>> x = np.arange(12.0).reshape(3, 4) ** 2 + 1
        >>> relation(np.roll(x, 1, 1), x), relation(x[::-1], x), relation(x, x)
        ('axis 1 is rolled by 1', 'axis 0 is reversed', '')
    """
    for order in _permutations(torch):
        if order != tuple(range(torch.ndim)) and same_array(flax, torch.transpose(order)):
            return f"its axes are those of torch in the order {plain(order)}"
    return _along_axes(flax, torch) or _along_joined_axes(flax, torch)


def _along_joined_axes(flax: np.ndarray, torch: np.ndarray) -> str:
    """Return the difference in order along two neighbouring axes, read as one."""
    for shape in _joined(torch.shape):
        found = _along_axes(flax.reshape(shape), torch.reshape(shape))
        if found:
            return found
    return ""


def _joined(shape: Sequence[int]) -> Iterator[list[int]]:
    """Yield a shape with each two neighbouring axes as one."""
    for axis in range(len(shape) - 1):
        size = shape[axis] * shape[axis + 1]
        yield [*shape[:axis], size, *shape[axis + 2 :]]


def _along_axes(flax: np.ndarray, torch: np.ndarray) -> str:
    """Return the difference in order along each axis by itself, if that is all."""
    index = _index_map(flax, torch)
    if index is None:
        return ""
    parts = []
    for axis, own in enumerate(index):
        along = _along(own, axis)
        if along is None:
            return ""
        if (along != np.arange(len(along))).any():
            parts.append(_described(along, axis))
    return "; ".join(parts)


def _permutations(array: np.ndarray) -> Iterator[tuple[int, ...]]:
    if array.ndim > AXES:
        return
    for order in permutations(range(array.ndim)):
        if tuple(array.shape[axis] for axis in order) == array.shape:
            yield order


def _index_map(flax: np.ndarray, torch: np.ndarray) -> list[np.ndarray] | None:
    """Return for each axis where each number of one array is in the other."""
    if flax.shape != torch.shape or len(np.unique(torch)) != torch.size:
        return None
    # The numbers are different ones: those of the same rank are the same.
    index = np.empty(flax.size, int)
    index[_ranked(flax)] = _ranked(torch)
    along = np.unravel_index(index, flax.shape)
    return [own.reshape(flax.shape) for own in along]


def _ranked(array: np.ndarray) -> np.ndarray:
    return np.argsort(array.reshape(-1), kind="stable")


def _along(index: np.ndarray, axis: int) -> np.ndarray | None:
    """Return an index along its own axis, if it depends on no other."""
    lines = np.moveaxis(index, axis, 0).reshape(index.shape[axis], -1)
    return lines[:, 0] if (lines == lines[:, :1]).all() else None


def _described(along: np.ndarray, axis: int) -> str:
    size = len(along)
    straight = np.arange(size)
    if (along == straight[::-1]).all():
        return f"axis {axis} is reversed"
    shift = int(along[0])
    if (along == (straight + shift) % size).all():
        rolled = -shift if shift <= size // 2 else size - shift
        return f"axis {axis} is rolled by {rolled}"
    first = _transposed_by(along)
    if first is not None:
        return _split_otherwise(axis, first, size // first)
    listed = [str(i) for i in along[:LONGEST]]
    if size > LONGEST:
        listed.append("...")
    return f"axis {axis} is in the order {', '.join(listed)} of torch"


def _split_otherwise(axis: int, first: int, second: int) -> str:
    size = first * second
    ours, theirs = plain((first, second)), plain((second, first))
    if ours == theirs:
        return f"axis {axis} of {size}, split as {ours}, is transposed"
    return f"axis {axis} of {size} is split as {ours}, in torch as {theirs}"


def _transposed_by(along: np.ndarray) -> int | None:
    """Return the length of the first of two axes, whose transposition gives an order of both."""
    size = len(along)
    for first in range(2, size):
        if size % first:
            continue
        split = np.arange(size).reshape(first, -1)
        if (along == split.T.reshape(-1)).all():
            return first
    return None
