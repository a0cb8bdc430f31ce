"""The normal form of each operation: a rule by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flax_attn.parity.trace.expression import (
    ONE,
    ZERO,
    Expression,
    number,
    order,
    product,
    scaled,
    split,
    total,
)
from flax_attn.parity.trace.patterns import LAYOUT
from flax_attn.parity.trace.program import Node

# Arrays of one number, whatever they take their shape from.
FILLED = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
SWAPPED = {"gt": "lt", "ge": "le"}


def _settings(node: Node) -> tuple[Any, ...]:
    """Return the parameters of an operation, axes by their sizes: these have one layout."""
    found = []
    for name, value in sorted(node.parameters.items()):
        if name in ("axes", "axis") and node.operands:
            found.append(("over", sizes_over(node, value)))
        elif value is not None:
            found.append((name, value))
    return tuple(found)


def sizes_over(node: Node, axes: Any) -> tuple[int, ...]:
    """Return the sizes of axes of what an operation is given."""
    # What is joined has the size of all together, whichever of them comes first.
    shape = (node if node.operation == "concat" else node.operands[0]).value.shape
    axes = axes if isinstance(axes, tuple) else (axes,)
    return tuple(sorted(shape[axis] for axis in axes)) if shape else ()


Rule = Callable[[Node, list[Expression]], Expression]


def _first(node: Node, x: list[Expression]) -> Expression:
    return x[0]


def _add(node: Node, x: list[Expression]) -> Expression:
    second = product([(x[1], 1.0), (x[2], 1.0)]) if len(x) > 2 else x[1]
    return total([(1.0, x[0]), (1.0, second)], node)


def _sub(node: Node, x: list[Expression]) -> Expression:
    second = product([(x[1], 1.0), (x[2], 1.0)]) if len(x) > 2 else x[1]
    return total([(1.0, x[0]), (-1.0, second)], node)


def _mul(node: Node, x: list[Expression]) -> Expression:
    return product([(x[0], 1.0), (x[1], 1.0)], node)


def _div(node: Node, x: list[Expression]) -> Expression:
    return product([(x[0], 1.0), (x[1], -1.0)], node)


def _power_of(exponent: float) -> Rule:
    return lambda node, x: product([(x[0], exponent)], node)


def _pow(node: Node, x: list[Expression]) -> Expression:
    exponent = node.parameters.get("exponent")
    if exponent is None:
        exponent = x[1].number
    if exponent is None:
        factor, rest = split(x[1])
        if factor < 0:
            inverse = Expression("pow", (x[0], scaled(-factor, rest)), (), node)
            return product([(inverse, -1.0)], node)
        return Expression("pow", tuple(x), (), node)
    return product([(x[0], float(exponent))], node)


def _sum(node: Node, x: list[Expression]) -> Expression:
    factor, inner = split(x[0])
    sizes = sizes_over(node, node.parameters["axes"])
    return scaled(factor, Expression("sum_over", (inner,), (sizes,), node), node)


def _vector_norm(node: Node, x: list[Expression]) -> Expression:
    if node.parameters.get("ord", 2) != 2 or "axes" not in node.parameters:
        return contained(node, x)
    squares = product([(x[0], 2.0)])
    summed = Expression("sum_over", (squares,), (sizes_over(node, node.parameters["axes"]),), node)
    return product([(summed, 0.5)], node)


def _mean(node: Node, x: list[Expression]) -> Expression:
    sizes = sizes_over(node, node.parameters["axes"])
    return scaled(1 / np.prod(sizes), _sum(node, x), node)


def _amax(node: Node, x: list[Expression]) -> Expression:
    return Expression("amax", (x[0],), (sizes_over(node, node.parameters["axes"]),), node)


def _max(node: Node, x: list[Expression]) -> Expression:
    numbers = [operand.number for operand in x]
    if -np.inf in numbers:
        return x[1 - numbers.index(-np.inf)]
    if 0.0 in numbers:
        return Expression("relu", (x[1 - numbers.index(0.0)],), (), node)
    return Expression("max", tuple(sorted(x, key=order)), (), node)


def _erf(node: Node, x: list[Expression]) -> Expression:
    factor, _ = split(x[0])
    sign = -1.0 if factor < 0 else 1.0
    return scaled(sign, Expression("erf", (scaled(sign, x[0]),), (), node), node)


def _erfc(node: Node, x: list[Expression]) -> Expression:
    return total([(1.0, ONE), (-1.0, _erf(node, x))], node)


def _dot(node: Node, x: list[Expression]) -> Expression:
    left, right = split(x[0]), split(x[1])
    inner = tuple(sorted((left[1], right[1]), key=order))
    return scaled(left[0] * right[0], Expression("dot", inner, (), node), node)


def _where(node: Node, x: list[Expression]) -> Expression:
    # JAX has the case for False first.
    if node.parameters.get("false_first"):
        return _chosen(node, x[0], (x[2], x[1]))
    return _chosen(node, x[0], (x[1], x[2]))


def _scattered(node: Node, x: list[Expression]) -> Expression:
    return Expression("scatter-add", (ZERO, x[1], x[0]), (), node)


def _masked(node: Node, x: list[Expression]) -> Expression:
    return _chosen(node, x[1], (x[2], x[0]))


def _chosen(node: Node, condition: Expression, cases: tuple[Expression, Expression]) -> Expression:
    """Return the first case where a condition holds, and the second elsewhere."""
    if condition.operation == "not":
        condition, cases = condition.operands[0], (cases[1], cases[0])
    if condition.number is not None:
        return cases[0] if condition.number else cases[1]
    numbers = cases[0].number, cases[1].number
    if node.value.dtype == bool and numbers == (1.0, 0.0):
        return condition
    if node.value.dtype == bool and numbers == (0.0, 1.0):
        return Expression("not", (condition,), (), node)
    return Expression("where", (condition, *cases), (), node)


def _filled(node: Node, x: list[Expression]) -> Expression:
    return number(float(node.value.flat[0]), node) if node.value.size else contained(node, x)


def contained(node: Node, x: list[Expression]) -> Expression:
    """Return an operation without a rule of its own."""
    return Expression(node.operation, tuple(x), _settings(node), node)


def _not(node: Node, x: list[Expression]) -> Expression:
    return x[0].operands[0] if x[0].operation == "not" else Expression("not", (x[0],), (), node)


def _cast(node: Node, x: list[Expression]) -> Expression:
    dtype = str(node.parameters.get("dtype"))
    wider = dtype == "float64" or not node.operands[0].floating
    return x[0] if wider else Expression("cast", (x[0],), (dtype,), node)


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
        return number(float(node.value.flat[0]), node) if node.value.size else contained(node, x)
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


RULES: dict[str, Rule] = {
    **dict.fromkeys(LAYOUT, _first),
    "add": _add,
    "add_any": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "neg": lambda node, x: total([(-1.0, x[0])], node),
    "square": _power_of(2.0),
    "sqrt": _power_of(0.5),
    "rsqrt": _power_of(-0.5),
    "reciprocal": _power_of(-1.0),
    "pow": _pow,
    "sum": _sum,
    "mean": _mean,
    "norm": _vector_norm,
    "amax": _amax,
    "max": _max,
    "erf": _erf,
    "erfc": _erfc,
    "dot": _dot,
    "where": _where,
    "masked_fill": _masked,
    "embedding_dense_backward": _scattered,
    **dict.fromkeys(FILLED, _filled),
    "not": _not,
    "cast": _cast,
    "slice": _slice,
    "element": _slice,
    "split": _slice,
    "conv": _conv,
    "pad": _pad,
    "stack": _stack,
    "topk": _topk,
    "iota": _iota,
    **dict.fromkeys(("fft_r2c", "fft_c2r", "fft_c2c"), _fft),
}
