"""The axes along which an operation runs, on both sides in one layout."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from flax_attn.parity.trace.expression import Expression, leaves_of
from flax_attn.parity.trace.layouts import laid_out
from flax_attn.parity.trace.numbers import LAYOUTS, Numbers, same_array
from flax_attn.parity.trace.program import Node

# The axes along which an operation runs, if it has any, and the shape that they are axes of.
Along = tuple[tuple[int, ...] | None, tuple[int, ...]]
# Operations that depend on the axis along which they run.
ALONG_AXES = ("sum", "mean", "amax", "amin", "prod", "cumsum", "cumprod", "sort", "argmax")


def innermost(flax: Expression, torch: Expression) -> tuple[Expression, Expression] | None:
    """Return the first operations of equal operands that run along other axes."""
    for one, other in zip(flax.operands, torch.operands, strict=False):
        found = innermost(one, other)
        if found is not None:
            return found
    ours, theirs = flax.origin, torch.origin
    if ours is None or theirs is None or ours.operation not in ALONG_AXES:
        return None
    alike = ours.operation == theirs.operation
    if alike and Numbers(ours.value).equals(Numbers(theirs.value)):
        return None
    axes, shape = axes_of(ours)
    others, there = in_layout_of(flax, torch)
    # Without a common layout, axes of one side say nothing about those of the other.
    if shape != there or axes is None or others is None:
        return None
    return (flax, torch) if axes != others else None


def in_layout_of(flax: Expression, torch: Expression) -> Along:
    """Return the axes of PyTorch as axes of the operand of JAX, read from a value that both have.

    The operands themselves may differ already, as the largest scores of a softmax do.
    """
    assert flax.origin is not None
    assert torch.origin is not None
    axes, shape = axes_of(torch.origin)
    wanted = flax.origin.operands[0].value.shape
    theirs = _leaves_of_shape(torch, shape)
    for leaf, value in _leaves_of_shape(flax, wanted).items():
        if leaf in theirs and axes is not None:
            moved = _moved_axes(value, theirs[leaf], axes)
            if moved is not None:
                return moved, wanted
    return axes, shape


def _leaves_of_shape(
    expression: Expression, shape: tuple[int, ...]
) -> dict[Expression, np.ndarray]:
    """Return the values of a shape that both sides have, inside of an expression."""
    nodes = {leaf: leaf.origin for leaf in leaves_of(expression)}
    values = {leaf: node.value for leaf, node in nodes.items() if node is not None}
    return {leaf: value for leaf, value in values.items() if value.shape == shape}


def _moved_axes(
    ours: np.ndarray, theirs: np.ndarray, axes: Sequence[int]
) -> tuple[int, ...] | None:
    """Return axes of an array as axes of the same numbers in another layout; None if not found."""
    moved: list[int] = []
    for axis in axes:
        # The index along this axis of every element, which is laid out like the elements.
        index = np.broadcast_to(np.indices(theirs.shape, sparse=True)[axis], theirs.shape)
        layouts = zip(laid_out(theirs, ours.shape), laid_out(index, ours.shape), strict=True)
        fitting = (i for values, i in islice(layouts, LAYOUTS) if same_array(values, ours))
        there = next(fitting, None)
        if there is None:
            return None
        moved += [own for own in range(ours.ndim) if np.ptp(there, axis=own).any()]
    return tuple(sorted(moved))


def axes_of(node: Node) -> Along:
    """Return the axes along which an operation runs, and the shape that they are axes of."""
    axes = node.parameters.get("axes", node.parameters.get("axis"))
    axes = (axes,) if isinstance(axes, int) else axes
    return axes, node.operands[0].value.shape
