"""The normal form of each operation: a rule by its name."""

from __future__ import annotations

from collections.abc import Callable
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
from flax_attn.parity.trace.placing_rules import PLACING
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


def _added(node: Node, x: list[Expression]) -> Expression:
    return Expression("scatter-add", tuple(x), (), node)


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
    **dict.fromkeys(("index_add", "scatter_add"), _added),
    **dict.fromkeys(FILLED, _filled),
    "not": _not,
    "cast": _cast,
    **PLACING,
}
