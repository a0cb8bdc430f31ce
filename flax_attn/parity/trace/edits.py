"""The edits that a mutant is made by: what porters get wrong, at one operation of a jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations, permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from flax_attn.parity.trace.operation import Compute, Operands, Operation, after, on_changed, only

# What tells an edit from the others of its kind, in words, and the edited operation.
Variant = tuple[str, Compute]

BINARY = {"add": "term", "sub": "term", "mul": "factor", "div": "factor"}
ORDERED = ("sub", "div", "pow", "atan2", "lt", "le", "gt", "ge")
NEXT = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}
OTHERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "sin": ("cos", jnp.cos),
    "cos": ("sin", jnp.sin),
    "erf": ("tanh", jnp.tanh),
    "tanh": ("erf", jax.scipy.special.erf),
    "exp": ("expm1", jnp.expm1),
    "rsqrt": ("1 / x", jnp.reciprocal),
    "max": ("min", jnp.minimum),
    "min": ("max", jnp.maximum),
}
REDUCTIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "reduce_max": ("amin", jnp.min),
    "reduce_min": ("amax", jnp.max),
    "reduce_sum": ("amax", jnp.max),
}
FACTORS = (0.5, 1.01, 2.0)
# The largest constant that is taken for an epsilon.
EPSILON = 1e-3


def drop(op: Operation) -> Iterator[Variant]:
    """Leave out an operation of one operand."""
    skipped = op.primitive in ("stop_gradient", "convert_element_type", "reshape")
    if op.kind != "f" or len(op.given) != 1 or skipped:
        return
    if (op.given[0].shape, op.given[0].dtype) == (op.shape, op.equation.outvars[0].aval.dtype):
        yield f"{op.name} is left out", only(op, 0)


def missing(op: Operation) -> Iterator[Variant]:
    """Leave out a term of a sum or a factor of a product."""
    if op.primitive not in BINARY or op.kind != "f":
        return
    for i, atom in enumerate(op.equation.invars):
        if not isinstance(atom, Literal):
            left = ("second", "first")[i]
            yield f"{op.name}: the {left} {BINARY[op.primitive]} is left out", only(op, i)


def swap(op: Operation) -> Iterator[Variant]:
    """Exchange operands."""
    if op.primitive in ORDERED:
        yield f"{op.name}: its operands are exchanged", lambda given: op.run(given[::-1])
    if op.primitive == "select_n" and len(op.given) == 3:
        run = lambda given: op.run([given[0], given[2], given[1]])  # noqa: E731
        yield "where: its cases are exchanged", run
    if op.primitive == "concatenate" and len(op.given) > 1:
        yield "concat: its operands are in reverse order", lambda given: op.run(given[::-1])


def transpose(op: Operation) -> Iterator[Variant]:
    """Exchange two axes of one size."""
    for i, j in combinations(op.axes, 2):
        if op.shape[i] == op.shape[j] and op.kind == "f":
            change = partial(jnp.swapaxes, axis1=i, axis2=j)
            yield f"{op.name}: axes {i} and {j} of the result are exchanged", after(change, op)


def permute(op: Operation) -> Iterator[Variant]:
    """Split or merge axes in another order."""
    if op.primitive != "reshape" or op.equation.params.get("dimensions") is not None:
        return
    before, after = op.given[0].shape, op.shape
    split = len(after) > len(before)
    few, many = (before, after) if split else (after, before)
    count = len(many) - len(few) + 1
    start = next((i for i, size in enumerate(few) if size != many[i]), len(few))
    group = many[start : start + count]
    alike = few[start + 1 :] == many[start + count :]
    if count < 2 or start == len(few) or not alike or min(group) < 2:
        return
    for order in list(permutations(range(count)))[1:]:
        if split:
            sizes = (*few[:start], *(group[i] for i in order), *many[start + count :])
            axes = _within(np.argsort(order).tolist(), start, len(many))
            yield (
                f"reshape: axis {start} is split in the order {order}",
                partial(_split, sizes=sizes, axes=axes),
            )
        else:
            axes = _within(order, start, len(many))
            yield (
                f"reshape: axes from {start} are merged in the order {order}",
                partial(_merged, axes=axes, shape=after),
            )


def _within(order: Sequence[int], start: int, count: int) -> list[int]:
    middle = [start + int(i) for i in order]
    return [*range(start), *middle, *range(start + len(middle), count)]


def _split(operands: Operands, sizes: Sequence[int], axes: Sequence[int]) -> Any:
    return jnp.transpose(jnp.reshape(operands[0], sizes), axes)


def _merged(operands: Operands, axes: Sequence[int], shape: Sequence[int]) -> Any:
    return jnp.reshape(jnp.transpose(operands[0], axes), shape)


def scale(op: Operation) -> Iterator[Variant]:
    """Multiply by a factor."""
    if op.kind == "f":
        for factor in FACTORS:
            change = partial(_times, factor=factor)
            yield f"{op.name}: the result is multiplied by {factor:g}", after(change, op)


def _times(x: Any, factor: float) -> Any:
    return x * jnp.asarray(factor, x.dtype)


def constant(op: Operation) -> Iterator[Variant]:
    """Take another epsilon, or another exponent."""
    if op.primitive == "integer_pow":
        y = op.equation.params["y"]
        yield f"pow: the exponent is {y + 1}", lambda given: op.run(given, y=y + 1)
    if op.primitive not in ("add", "sub", "max") or op.kind != "f":
        return
    for i, value in op.constants():
        if 0 < abs(value) <= EPSILON:
            change = partial(_times, factor=10.0)
            yield f"{op.name}: the constant is {10 * value:g}", on_changed(op, i, change)


def cast(op: Operation) -> Iterator[Variant]:
    """Round to float32."""
    if op.kind == "f":
        yield f"{op.name}: the result is rounded to float32", after(_rounded, op)


def _rounded(x: Any) -> Any:
    return x.astype(jnp.float32).astype(x.dtype)


def shift(op: Operation) -> Iterator[Variant]:
    """Move all elements on by one."""
    for axis in op.axes if op.kind else ():
        change = partial(jnp.roll, shift=1, axis=axis)
        yield f"{op.name}: the result is shifted by one along axis {axis}", after(change, op)


def reverse(op: Operation) -> Iterator[Variant]:
    """Reverse the order of elements, or the direction of a sum of all before."""
    for axis in op.axes if op.kind else ():
        change = partial(jnp.flip, axis=axis)
        yield f"{op.name}: the result is reversed along axis {axis}", after(change, op)
    backwards = op.equation.params.get("reverse")
    if isinstance(backwards, bool) and op.primitive.startswith("cum"):
        run = lambda given: op.run(given, reverse=not backwards)  # noqa: E731
        yield f"{op.name}: runs in the other direction", run


def axis(op: Operation) -> Iterator[Variant]:
    """Reduce, accumulate or normalise along another axis."""
    params = op.equation.params
    if op.primitive.startswith("cum"):
        for other in set(op.axes) - {params["axis"]}:
            yield f"{op.name}: along axis {other}", partial(op.run, axis=other)
    if op.primitive.startswith(("reduce_", "arg")) and "axes" in params and len(op.given) == 1:
        sizes = op.given[0].shape
        for own in params["axes"]:
            for other, size in enumerate(sizes):
                if size == sizes[own] and other not in params["axes"]:
                    changed = sorted({*params["axes"], other} - {own})
                    run = partial(op.run, axes=tuple(changed))
                    yield f"{op.name}: along axis {other} in place of {own}", run
    summed = _normalised(op)
    for other in set(op.axes) - summed if summed else ():
        run = partial(_normalise, axis=other)
        yield f"normalised along axis {other} in place of {min(summed)}", run


def _normalised(op: Operation) -> set[int]:
    """Return the axes of the sum of the dividend that it is divided by, as in a softmax."""
    if op.primitive != "div":
        return set()
    dividend, divisor = op.equation.invars
    maker = None if isinstance(divisor, Literal) else op.makers.get(divisor)
    while maker is not None and maker.primitive.name in ("broadcast_in_dim", "reshape"):
        maker = op.makers.get(maker.invars[0])
    if maker is None or maker.primitive.name != "reduce_sum" or maker.invars[0] is not dividend:
        return set()
    return set(maker.params["axes"])


def _normalise(operands: Operands, axis: int) -> Any:
    return operands[0] / jnp.sum(operands[0], axis=axis, keepdims=True)


def off_by_one(op: Operation) -> Iterator[Variant]:
    """Shift a bound, an index, a position or a padding by one."""
    params = op.equation.params
    if op.primitive in NEXT:
        symbol = {"lt": jnp.less, "le": jnp.less_equal, "gt": jnp.greater, "ge": jnp.greater_equal}
        other = NEXT[op.primitive]
        yield f"{op.name}: is {other}", lambda given: symbol[other](*given)
    if op.primitive == "iota" and op.kind in "if":
        yield "iota: counts from 1", after(lambda x: x + jnp.ones((), x.dtype), op)
    if op.primitive in ("gather", "dynamic_slice"):
        for i, aval in enumerate(op.given[1:], 1):
            if jnp.issubdtype(aval.dtype, jnp.integer):
                yield f"{op.name}: index {i} is one more", on_changed(op, i, lambda x: x + 1)
    if op.primitive == "slice":
        yield from _bounds(op)
    if op.primitive == "conv_general_dilated":
        for i, (low, high) in enumerate(params["padding"]):
            if high > 0:
                padding = list(params["padding"])
                padding[i] = (low + 1, high - 1)
                run = partial(op.run, padding=tuple(padding))
                yield f"conv: padding {i} is {padding[i]} in place of {(low, high)}", run


def _bounds(op: Operation) -> Iterator[Variant]:
    starts, stops = op.equation.params["start_indices"], op.equation.params["limit_indices"]
    for axis, size in enumerate(op.given[0].shape):
        for step in (-1, 1):
            if starts[axis] + step < 0 or stops[axis] + step > size:
                continue
            start, stop = list(starts), list(stops)
            start[axis] += step
            stop[axis] += step
            run = partial(op.run, start_indices=tuple(start), limit_indices=tuple(stop))
            yield f"slice: starts at {start[axis]} of axis {axis}, not {starts[axis]}", run


def other(op: Operation) -> Iterator[Variant]:
    """Compute another function: the smallest for the largest, a sine for a cosine."""
    if op.primitive in OTHERS and op.kind == "f":
        name, function = OTHERS[op.primitive]
        yield f"{name} in place of {op.name}", lambda given: function(*given)
    if op.primitive in REDUCTIONS and op.kind == "f":
        name, reduction = REDUCTIONS[op.primitive]
        axes = tuple(op.equation.params["axes"])
        yield f"{name} in place of {op.name}", lambda given: reduction(given[0], axis=axes)


def sign(op: Operation) -> Iterator[Variant]:
    """Change a sign, or the polarity of a mask."""
    if op.kind == "f":
        yield f"{op.name}: the result has the other sign", after(jnp.negative, op)
    if op.kind == "b":
        yield f"{op.name}: the result is negated", after(jnp.logical_not, op)
    if op.primitive == "add" and op.kind == "f":
        yield "add: the second term has the other sign", on_changed(op, 1, jnp.negative)


def stop_gradient(op: Operation) -> Iterator[Variant]:
    """Stop the gradient."""
    if op.kind == "f" and op.primitive != "stop_gradient":
        change = jax.lax.stop_gradient
        yield f"{op.name}: no gradient flows through the result", after(change, op)


#: The kinds of edits, by name: the variants of each at an operation.
CATALOGUE: dict[str, Callable[[Operation], Iterator[Variant]]] = {
    "drop": drop,
    "missing": missing,
    "swap": swap,
    "transpose": transpose,
    "permute": permute,
    "scale": scale,
    "constant": constant,
    "cast": cast,
    "shift": shift,
    "reverse": reverse,
    "axis": axis,
    "off by one": off_by_one,
    "other": other,
    "sign": sign,
    "stop_gradient": stop_gradient,
}
