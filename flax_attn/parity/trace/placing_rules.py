"""The normal form of operations that put numbers to places, and of convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flax_attn.parity.trace.expression import ONE, ZERO, Expression, number, total
from flax_attn.parity.trace.program import Node

# The size of an axis, and what is taken of it: start, stop, step.
Bound = tuple[int, int, int, int]


def _slice(node: Node, x: list[Expression]) -> Expression:
    bounds = _bounds(node)
    return Expression("slice", (x[0],), bounds, node) if bounds else x[0]


def _bounds(node: Node) -> tuple[Bound, ...]:
    """Return what is taken of each axis that is not taken whole."""
    shape, given = node.operands[0].value.shape, node.parameters
    if "index" in given:
        (axis,) = given.get("axes", (0,))
        start = given["index"] % shape[axis]
        return ((shape[axis], start, start + 1, 1),)
    if given.keys() & {"result", "split_size", "split_sizes"}:
        return _piece(node)
    if isinstance(given.get("start"), tuple):
        # JAX bounds every axis, PyTorch one at a time.
        steps = given["step"] or (1,) * len(shape)
        every = zip(shape, given["start"], given["stop"], steps, strict=True)
        return tuple(bound for bound in every if not _is_whole(bound))
    if "axes" not in given:
        return ()
    (axis,) = given["axes"]
    taken = slice(given.get("start"), given.get("end"), given.get("step"))
    bound = (shape[axis], *taken.indices(shape[axis]))
    return () if _is_whole(bound) else (bound,)


def _is_whole(bound: Bound) -> bool:
    return bound == (bound[0], 0, bound[0], 1)


def _piece(node: Node) -> tuple[Bound, ...]:
    """Return what one result of a split takes."""
    given = node.parameters
    axis = given.get("axis", given.get("axes", (0,)))
    axis = axis[0] if isinstance(axis, tuple) else axis
    size = node.operands[0].value.shape[axis]
    index = given.get("result", 0)
    sizes = given.get("sizes", given.get("split_sizes"))
    if sizes is None:
        each = given.get("split_size", 1)
        start = index * each
        # The last piece may be shorter.
        return ((size, start, min(start + each, size), 1),)
    start = sum(sizes[:index])
    return ((size, start, start + sizes[index], 1),)


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
    sizes = zip(shape, _around(node), strict=True)
    longer = [(size, *pads) for size, pads in sizes if any(pads)]
    if not longer:
        return x[0]
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
    if not node.value.size:
        return ZERO
    start, stop = float(node.value.flat[0]), node.value.flat[-1]
    # Along other axes the numbers are repeated.
    count = len(np.unique(node.value))
    if count < 2:
        return number(start, node)
    step = float(stop - start) / (count - 1)
    counted = Expression("iota", (), (("size", count),), node)
    return total([(step, counted), (start, ONE)], node)


def _fft(node: Node, x: list[Expression]) -> Expression:
    """Return a Fourier transform by its lengths; an inverse one is divided by them in JAX."""
    given = node.parameters
    to_real = node.operation == "fft_c2r"
    forward = given.get("forward", not to_real)
    inverse = given.get("inverse", not forward)
    lengths = given.get("lengths", ())
    if "axes" in given:
        # A spectrum of real numbers is shorter than they are.
        real = node.value if to_real else node.operands[0].value
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
    padding = [pad if isinstance(pad, tuple) else (pad, pad) for pad in given["padding"]]
    image, *others = x
    before = _zeros_around(node, image)
    # Zeros that are put around the image before, and by the convolution itself, are one thing.
    if before is not None:
        image = image.operands[0]
        padding = [tuple(pair) for pair in np.add(padding, before).tolist()]
    settings = (
        ("stride", tuple(given["stride"])),
        ("padding", tuple(padding)),
        ("dilation", tuple(given["dilation"])),
        ("groups", given["groups"]),
    )
    return Expression("conv", (image, *others), settings, node)


def _zeros_around(node: Node, image: Expression) -> list[tuple[int, ...]] | None:
    """Return the zeros that were put before and after the axes along which a convolution runs.

    None where there are others: between elements, or around the channels.
    """
    padded = node.operands[0]
    if image.operation != "pad" or image.origin is not padded:
        return None
    around = dict(enumerate(_around(padded)))
    pads = [around.pop(axis) for axis in _spatial(node)]
    between = any(len(pad) > 2 for pad in pads)
    elsewhere = any(map(any, around.values()))
    filling = image.operands[1]
    return None if between or elsewhere or filling != ZERO else pads


PLACING: dict[str, Callable[[Node, list[Expression]], Expression]] = {
    **dict.fromkeys(("slice", "element", "split"), _slice),
    "conv": _conv,
    "pad": _pad,
    "stack": _stack,
    "topk": _topk,
    "iota": _iota,
    **dict.fromkeys(("fft_r2c", "fft_c2r", "fft_c2c"), _fft),
}
