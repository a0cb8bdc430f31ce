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
    given = node.parameters
    if "index" in given:
        return (_element(node),)
    if given.keys() & {"result", "split_size", "split_sizes"}:
        return (_piece(node),)
    bounds = []
    # JAX bounds every axis at once, PyTorch one.
    if isinstance(given.get("start"), tuple):
        bounds = _of_every_axis(node)
    elif "axes" in given:
        bounds = [_of_one_axis(node)]
    return tuple(filter(_is_part, bounds))


def _is_part(bound: Bound) -> bool:
    size, *taken = bound
    return taken != [0, size, 1]


def _of_every_axis(node: Node) -> list[Bound]:
    shape, given = node.operands[0].value.shape, node.parameters
    steps = given["step"] or (1,) * len(shape)
    return list(zip(shape, given["start"], given["stop"], steps, strict=True))


def _of_one_axis(node: Node) -> Bound:
    size, given = _size_along(node), node.parameters
    taken = slice(given.get("start"), given.get("end"), given.get("step"))
    return size, *taken.indices(size)


def _size_along(node: Node) -> int:
    """Return the size of the one axis of which an operation takes a part."""
    axis = node.parameters.get("axis", node.parameters.get("axes", (0,)))
    if isinstance(axis, tuple):
        (axis,) = axis
    return node.operands[0].value.shape[axis]


def _element(node: Node) -> Bound:
    size = _size_along(node)
    start = node.parameters["index"] % size
    return size, start, start + 1, 1


def _piece(node: Node) -> Bound:
    """Return what one result of a split takes."""
    sizes = node.parameters.get("sizes", node.parameters.get("split_sizes"))
    if sizes is None:
        return _equal_piece(node)
    index = node.parameters.get("result", 0)
    start = sum(sizes[:index])
    return _size_along(node), start, start + sizes[index], 1


def _equal_piece(node: Node) -> Bound:
    size, given = _size_along(node), node.parameters
    each = given.get("split_size", 1)
    start = given.get("result", 0) * each
    # The last piece may be shorter.
    return size, start, min(start + each, size), 1


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
    first, last = node.value.flat[0], node.value.flat[-1]
    start = float(first)
    # Along other axes the numbers are repeated.
    count = len(np.unique(node.value))
    if count < 2:
        return number(start, node)
    step = float(last - start) / (count - 1)
    counted = Expression("iota", (), (("size", count),), node)
    return total([(step, counted), (start, ONE)], node)


def _fft(node: Node, x: list[Expression]) -> Expression:
    """Return a Fourier transform by its lengths; an inverse one is divided by them in JAX."""
    inverse = _is_inverse(node)
    scaling = 2 if inverse else 0
    settings = {
        "lengths": _lengths(node),
        "inverse": inverse,
        "normalization": node.parameters.get("normalization", scaling),
    }
    return Expression(node.operation, tuple(x), tuple(settings.items()), node)


def _is_inverse(node: Node) -> bool:
    given = node.parameters
    # Of PyTorch's transforms, the one to real numbers does not say that it is inverse.
    forward = given.get("forward", node.operation != "fft_c2r")
    return given.get("inverse", not forward)


def _lengths(node: Node) -> tuple[int, ...]:
    """Return the lengths along which a Fourier transform runs."""
    given = node.parameters
    if "axes" not in given:
        return given.get("lengths", ())
    # A spectrum of real numbers is shorter than they are.
    real = node.value if node.operation == "fft_c2r" else node.operands[0].value
    return tuple(real.shape[axis] for axis in given["axes"])


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
    # Zeros that are put around the image before, and by the convolution itself, are one thing.
    before = _zeros_before(node) if _puts_zeros(image, node.operands[0]) else None
    if before is not None:
        image = image.operands[0]
        padding = [tuple(pair) for pair in np.add(padding, before).tolist()]
    settings = {
        "stride": tuple(given["stride"]),
        "padding": tuple(padding),
        "dilation": tuple(given["dilation"]),
        "groups": given["groups"],
    }
    return Expression("conv", (image, *others), tuple(settings.items()), node)


def _puts_zeros(x: Expression, node: Node) -> bool:
    """Whether an expression is a padding with zeros, which a node computes."""
    return x.operation == "pad" and x.origin is node and x.operands[1] == ZERO


def _zeros_before(node: Node) -> list[tuple[int, ...]] | None:
    """Return what a padding puts around the axes along which a convolution of it runs.

    None where it puts zeros elsewhere: between elements, or around the channels.
    """
    around = dict(enumerate(_around(node.operands[0])))
    pads = [around.pop(axis) for axis in _spatial(node)]
    between = any(len(pad) > 2 for pad in pads)
    channels = any(map(any, around.values()))
    return None if between or channels else pads


PLACING: dict[str, Callable[[Node, list[Expression]], Expression]] = {
    **dict.fromkeys(("slice", "element", "split"), _slice),
    "conv": _conv,
    "pad": _pad,
    "stack": _stack,
    "topk": _topk,
    "iota": _iota,
    **dict.fromkeys(("fft_r2c", "fft_c2r", "fft_c2c"), _fft),
}
