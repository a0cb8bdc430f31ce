"""The normal form of operations that put numbers to places, and of convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flax_attn.parity.trace.expression import (
    ONE,
    ZERO,
    Expression,
    number,
    total,
)
from flax_attn.parity.trace.program import Node


def _slice(node: Node, x: list[Expression]) -> Expression:
    bounds = _bounds(node)
    return Expression("slice", (x[0],), bounds, node) if bounds else x[0]


def _bounds(node: Node) -> tuple[tuple[int, int, int, int], ...]:
    """Return what is taken of each axis that is not taken whole: size, start, stop, step."""
    shape, given = node.operands[0].value.shape, node.parameters
    if "index" in given:
        (axis,) = given.get("axes", (0,))
        start = given["index"] % shape[axis]
        return ((shape[axis], start, start + 1, 1),)
    if "result" in given or "split_size" in given or "split_sizes" in given:
        return _piece(node)
    starts = given.get("start")
    if isinstance(starts, tuple):
        steps = given["step"] or (1,) * len(starts)
        every = zip(shape, starts, given["stop"], steps, strict=True)
        return tuple(bound for bound in every if bound[1:] != (0, bound[0], 1))
    if "axes" not in given:
        return ()
    (axis,) = given["axes"]
    start, stop, step = slice(given.get("start"), given.get("end"), given.get("step")).indices(
        shape[axis]
    )
    return ((shape[axis], start, stop, step),) if (start, stop, step) != (0, shape[axis], 1) else ()


def _piece(node: Node) -> tuple[tuple[int, int, int, int], ...]:
    """Return what one result of a split takes."""
    shape, given = node.operands[0].value.shape, node.parameters
    axis = given.get("axis", given.get("axes", (0,)))
    axis = axis[0] if isinstance(axis, tuple) else axis
    index = given.get("result", 0)
    sizes = given.get("sizes", given.get("split_sizes"))
    if sizes is None:
        each = given.get("split_size", 1)
        start = index * each
        stop = min(start + each, shape[axis])
    else:
        start = sum(sizes[:index])
        stop = start + sizes[index]
    return ((shape[axis], start, stop, 1),)


def _stack(node: Node, x: list[Expression]) -> Expression:
    # Where the new axis stands is a matter of layout.
    return Expression("stack", tuple(x), (), node)


def _topk(node: Node, x: list[Expression]) -> Expression:
    given = node.parameters
    settings = [("k", given["k"]), ("result", given["result"])]
    if not given.get("largest", True):
        settings.append(("largest", False))
    return Expression("topk", (x[0],), tuple(settings), node)


def _pad(node: Node, x: list[Expression]) -> Expression:
    """Return a padding by the axes that it makes longer: size, before, after."""
    shape = node.operands[0].value.shape
    around = _around(node)
    if not any(map(any, around)):
        return x[0]
    longer = [(size, *pads) for size, pads in zip(shape, around, strict=True) if any(pads)]
    return Expression("pad", tuple(x), (("around", tuple(sorted(longer))),), node)


def _around(node: Node) -> list[tuple[int, ...]]:
    """Return what a padding puts before and after each axis, and between elements if it does."""
    if "padding" in node.parameters:
        pads = node.parameters["padding"]
        return [tuple(pad) if pad[2] else tuple(pad[:2]) for pad in pads]
    # PyTorch names the last axis first.
    flat = node.parameters["pad"]
    pairs = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]
    return [(0, 0)] * (node.operands[0].value.ndim - len(pairs)) + pairs[::-1]


def _iota(node: Node, x: list[Expression]) -> Expression:
    """Return numbers at equal distances as whole ones from 0, times a step, and a start."""
    numbers = np.unique(node.value)
    if len(numbers) < 2:
        return number(float(node.value.flat[0]), node) if node.value.size else ZERO
    start = float(node.value.flat[0])
    step = float(node.value.flat[-1] - start) / (len(numbers) - 1)
    counted = Expression("iota", (), (("size", len(numbers)),), node)
    return total([(step, counted), (start, ONE)], node)


def _fft(node: Node, x: list[Expression]) -> Expression:
    """Return a Fourier transform by its lengths; an inverse one is divided by them in JAX."""
    given = node.parameters
    real = node.value if node.operation == "fft_c2r" else node.operands[0].value
    inverse = given.get("inverse", not given.get("forward", node.operation != "fft_c2r"))
    lengths = given.get("lengths", ())
    if "axes" in given:
        lengths = tuple(real.shape[axis] for axis in given["axes"])
    scaling = given.get("normalization", 2 if inverse else 0)
    settings = (("lengths", lengths), ("inverse", inverse), ("normalization", scaling))
    return Expression(node.operation, tuple(x), settings, node)


def _spatial(node: Node) -> Sequence[int]:
    """Return the axes of the image along which a convolution runs, in the order of its settings."""
    # An operation of PyTorch has no equation, and its channels come first.
    if node.equation is None:
        return range(2, node.operands[0].value.ndim)
    return node.equation.params["dimension_numbers"].lhs_spec[2:]


def _conv(node: Node, x: list[Expression]) -> Expression:
    given = node.parameters
    padding = tuple(
        tuple(pad) if isinstance(pad, tuple) else (pad, pad) for pad in given["padding"]
    )
    image = node.operands[0]
    # Zeros that are put around the image before, and by the convolution itself, are one thing.
    if x[0].operation == "pad" and x[0].origin is image and x[0].operands[1] == ZERO:
        around = _around(image)
        spatial = _spatial(node)
        others = [pads for axis, pads in enumerate(around) if axis not in spatial]
        pairs = [around[axis] for axis in spatial]
        if all(len(pads) == 2 for pads in pairs) and not any(map(any, others)):
            joined = zip(padding, pairs, strict=True)
            padding = tuple((a + low, b + high) for (a, b), (low, high) in joined)
            x = [x[0].operands[0], *x[1:]]
    settings = [("stride", tuple(given["stride"])), ("padding", padding)]
    settings += [("dilation", tuple(given["dilation"])), ("groups", given["groups"])]
    return Expression("conv", tuple(x), tuple(settings), node)


PLACING: dict[str, Callable[[Node, list[Expression]], Expression]] = {
    **dict.fromkeys(("slice", "element", "split"), _slice),
    "conv": _conv,
    "pad": _pad,
    "stack": _stack,
    "topk": _topk,
    "iota": _iota,
    **dict.fromkeys(("fft_r2c", "fft_c2r", "fft_c2c"), _fft),
}
