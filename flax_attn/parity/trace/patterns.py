"""What a node moves, and the softmax and logsumexp in a graph."""

from __future__ import annotations

from itertools import permutations

import numpy as np

from flax_attn.parity.trace.program import Node

LAYOUT = frozenset(
    {"transpose", "reshape", "broadcast", "squeeze", "expand_dims", "view", "detach"}
    | {"stop_gradient"}
)


def logsumexp_of(node: Node) -> Node | None:
    """Return the sum of a `logsumexp`, which adds what its exponents lack; else None."""
    if node.operation != "add" or len(node.operands) != 2:
        return None
    for log, shift in permutations(node.operands):
        summed = summed_in(moved_from(log))
        if summed is None:
            continue
        exponential = moved_from(summed.operands[0])
        difference = moved_from(exponential.operands[0])
        if _shifts_by(difference, shift):
            return summed
    return None


def summed_in(log: Node) -> Node | None:
    """Return the sum of exponentials of which a node is the logarithm; None if it is not."""
    if log.operation != "log":
        return None
    summed = moved_from(log.operands[0])
    is_sum = summed.operation == "sum" and moved_from(summed.operands[0]).operation == "exp"
    return summed if is_sum else None


def _shifts_by(difference: Node, shift: Node) -> bool:
    if difference.operation != "sub":
        return False
    return moved_from(difference.operands[1]) is moved_from(shift)


def softmax_of(node: Node) -> Node | None:
    """Return the sum of a softmax, which divides exponentials by it; None if a node is none."""
    if node.operation != "div":
        return None
    exponential, summed = map(moved_from, node.operands)
    divides = exponential.operation == "exp" and summed.operation == "sum"
    return summed if divides and moved_from(summed.operands[0]) is exponential else None


def exponent(summed: Node) -> Node:
    """Return the argument of a softmax or `logsumexp`, without the maximum that is taken off."""
    x = moved_from(summed.operands[0]).operands[0]
    difference = moved_from(x)
    if difference.operation != "sub":
        return x
    largest = moved_from(difference.operands[1])
    return difference.operands[0] if largest.operation == "amax" else x


def is_same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays are the same in all but their memory."""
    return one.shape == other.shape and one.dtype == other.dtype and bool((one == other).all())


def moved_from(node: Node) -> Node:
    """Return what a node lays out otherwise, rounds, or returns unchanged."""
    source = _source(node)
    while source is not None:
        node, source = source, _source(source)
    return node


def _source(node: Node) -> Node | None:
    moves = node.operation in LAYOUT or node.operation == "cast"
    if moves and node.operands:
        return node.operands[0]
    # An addition of 0 or a dropout that is off computes nothing.
    same = (operand for operand in node.operands if is_same(operand.value, node.value))
    return next(same, None)
