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
from flax_attn.parity.trace.numbers import HIDING
from flax_attn.parity.trace.patterns import LAYOUT
from flax_attn.parity.trace.placing_rules import PLACING
from flax_attn.parity.trace.program import Node

# An operation in normal form, of a node and the expressions of its operands.
Rule = Callable[[Node, list[Expression]], Expression]
# Arrays of one number, whatever they take their shape from.
FILLED = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
SWAPPED = {"gt": "lt", "ge": "le"}


def _settings(node: Node) -> tuple[Any, ...]:
    """Return the parameters of an operation, axes by their sizes: these have one layout."""
    found = []
    for name, value in sorted(node.parameters.items()):
        if name in ("axes", "axis") and node.operands:
            name, value = "over", sizes_over(node, value)
        if value is not None:
            found.append((name, value))
    return tuple(found)


def sizes_over(node: Node, axes: Any) -> tuple[int, ...]:
    """Return the sizes of axes of what an operation is given."""
    # What is joined has the size of all together, whichever of them comes first.
    shape = (node if node.operation == "concat" else node.operands[0]).value.shape
    axes = axes if isinstance(axes, tuple) else (axes,)
    return tuple(sorted(shape[axis] for axis in axes)) if shape else ()


def _first(node: Node, x: list[Expression]) -> Expression:
    return x[0]


def _signed(sign: float) -> Rule:
    """Return the rule of a sum whose second operand has a sign, and a factor where there is one."""

    def rule(node: Node, x: list[Expression]) -> Expression:
        first, second, *factors = x
        for factor in factors:
            second = product([(second, 1.0), (factor, 1.0)])
        return total([(1.0, first), (sign, second)], node)

    return rule


def _times(power: float) -> Rule:
    """Return the rule of a product whose second operand has a power."""
    return lambda node, x: product([(x[0], 1.0), (x[1], power)], node)


def _power_of(exponent: float) -> Rule:
    return lambda node, x: product([(x[0], exponent)], node)


def _pow(node: Node, x: list[Expression]) -> Expression:
    exponent = node.parameters.get("exponent")
    if exponent is None:
        exponent = x[1].number
    if exponent is not None:
        return product([(x[0], float(exponent))], node)
    # A power of what is negative is one over a power.
    factor, rest = split(x[1])
    if factor < 0:
        inverse = Expression("pow", (x[0], scaled(-factor, rest)), (), node)
        return product([(inverse, -1.0)], node)
    return Expression("pow", tuple(x), (), node)


def _over_axes(operation: str, operand: Expression, node: Node) -> Expression:
    sizes = sizes_over(node, node.parameters["axes"])
    return Expression(operation, (operand,), (sizes,), node)


def _sum(node: Node, x: list[Expression]) -> Expression:
    factor, inner = split(x[0])
    summed = _over_axes("sum_over", inner, node)
    return scaled(factor, summed, node)


def _vector_norm(node: Node, x: list[Expression]) -> Expression:
    if node.parameters.get("ord", 2) != 2 or "axes" not in node.parameters:
        return contained(node, x)
    squares = product([(x[0], 2.0)])
    summed = _over_axes("sum_over", squares, node)
    return product([(summed, 0.5)], node)


def _mean(node: Node, x: list[Expression]) -> Expression:
    sizes = sizes_over(node, node.parameters["axes"])
    return scaled(1 / np.prod(sizes), _sum(node, x), node)


def _amax(node: Node, x: list[Expression]) -> Expression:
    return _over_axes("amax", x[0], node)


def _max(node: Node, x: list[Expression]) -> Expression:
    numbers = [operand.number for operand in x]
    if -np.inf in numbers:
        return x[1 - numbers.index(-np.inf)]
    if 0.0 in numbers:
        other = x[1 - numbers.index(0.0)]
        return Expression("relu", (other,), (), node)
    return Expression("max", tuple(sorted(x, key=order)), (), node)


def _min(node: Node, x: list[Expression]) -> Expression:
    numbers = [operand.number for operand in x]
    if 0.0 not in numbers:
        return contained(node, x)
    other = scaled(-1.0, x[1 - numbers.index(0.0)])
    return scaled(-1.0, Expression("relu", (other,), (), node), node)


def _erf(node: Node, x: list[Expression]) -> Expression:
    # An odd function: a sign within it is one before it.
    factor, _ = split(x[0])
    sign = -1.0 if factor < 0 else 1.0
    positive = Expression("erf", (scaled(sign, x[0]),), (), node)
    return scaled(sign, positive, node)


def _erfc(node: Node, x: list[Expression]) -> Expression:
    return total([(1.0, ONE), (-1.0, _erf(node, x))], node)


def _dot(node: Node, x: list[Expression]) -> Expression:
    (left, first), (right, second) = map(split, x[:2])
    inner = sorted((first, second), key=order)
    return scaled(left * right, Expression("dot", tuple(inner), (), node), node)


def _where(node: Node, x: list[Expression]) -> Expression:
    condition, first, second = x[:3]
    # JAX has the case for False first.
    if node.parameters.get("false_first"):
        first, second = second, first
    return _chosen(node, condition, first, second)


def _added(node: Node, x: list[Expression]) -> Expression:
    return Expression("scatter-add", tuple(x), (), node)


def _scattered(node: Node, x: list[Expression]) -> Expression:
    padding = node.parameters.get("padding_idx")
    settings = () if padding is None else (("padding_idx", padding),)
    return Expression("scatter-add", (ZERO, x[1], x[0]), settings, node)


def _masked(node: Node, x: list[Expression]) -> Expression:
    return _chosen(node, x[1], x[2], x[0])


def _chosen(node: Node, condition: Expression, first: Expression, second: Expression) -> Expression:
    """Return the first case where a condition holds, and the second elsewhere."""
    if condition.operation == "not":
        (condition,) = condition.operands
        first, second = second, first
    if condition.number is not None:
        return first if condition.number else second
    numbers = first.number, second.number
    is_mask = node.value.dtype == bool
    if is_mask and numbers == (1.0, 0.0):
        return condition
    opposite = Expression("not", (condition,), (), node)
    if is_mask and numbers == (0.0, 1.0):
        return opposite
    # `where(condition, n, 0)` is the condition times n. What hides is no factor.
    chosen, other = (np.inf if one is None else one for one in numbers)
    if other == 0 and abs(chosen) < HIDING:
        return scaled(chosen, condition, node)
    if chosen == 0 and abs(other) < HIDING:
        return scaled(other, opposite, node)
    return Expression("where", (condition, first, second), (), node)


def _filled(node: Node, x: list[Expression]) -> Expression:
    if not node.value.size:
        return contained(node, x)
    return number(float(node.value.flat[0]), node)


def contained(node: Node, x: list[Expression]) -> Expression:
    """Return an operation without a rule of its own."""
    return Expression(node.operation, tuple(x), _settings(node), node)


def _not(node: Node, x: list[Expression]) -> Expression:
    if x[0].operation == "not":
        return x[0].operands[0]
    return Expression("not", (x[0],), (), node)


def _cast(node: Node, x: list[Expression]) -> Expression:
    dtype = str(node.parameters.get("dtype"))
    # What loses no digits is no operation.
    if dtype == "float64" or not node.operands[0].floating:
        return x[0]
    return Expression("cast", (x[0],), (dtype,), node)


RULES: dict[str, Rule] = {
    **dict.fromkeys(LAYOUT, _first),
    "add": _signed(1.0),
    "add_any": _signed(1.0),
    "sub": _signed(-1.0),
    "mul": _times(1.0),
    "div": _times(-1.0),
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
    "min": _min,
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
