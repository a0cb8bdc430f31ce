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
# Other operations by the one that they replace: the name in plain notation, and the function.
Replacements = dict[str, tuple[str, Callable[..., Any]]]
NEXT: Replacements = {
    "lt": ("le", jnp.less_equal),
    "le": ("lt", jnp.less),
    "gt": ("ge", jnp.greater_equal),
    "ge": ("gt", jnp.greater),
}
OTHERS: Replacements = {
    "sin": ("cos", jnp.cos),
    "cos": ("sin", jnp.sin),
    "erf": ("tanh", jnp.tanh),
    "tanh": ("erf", jax.scipy.special.erf),
    "exp": ("expm1", jnp.expm1),
    "rsqrt": ("1 / x", jnp.reciprocal),
    "max": ("min", jnp.minimum),
    "min": ("max", jnp.maximum),
}
REDUCTIONS: Replacements = {
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
    given, result = op.given[0], op.equation.outvars[0].aval
    if (given.shape, given.dtype) == (result.shape, result.dtype):
        yield f"{op.name} is left out", only(op, 0)


def missing(op: Operation) -> Iterator[Variant]:
    """Leave out a term of a sum or a factor of a product."""
    if op.primitive not in BINARY or op.kind != "f":
        return
    word = BINARY[op.primitive]
    for i, left_out in enumerate(("second", "first")):
        # A number that is left over is no value of the program.
        if not isinstance(op.equation.invars[i], Literal):
            yield f"{op.name}: the {left_out} {word} is left out", only(op, i)


def swap(op: Operation) -> Iterator[Variant]:
    """Exchange operands."""
    count = len(op.given)
    backwards = partial(_permuted, op, range(count)[::-1])
    if op.primitive in ORDERED:
        yield f"{op.name}: its operands are exchanged", backwards
    if op.primitive == "select_n" and count == 3:
        # The first is the condition.
        yield "where: its cases are exchanged", partial(_permuted, op, (0, 2, 1))
    if op.primitive == "concatenate" and count > 1:
        yield "concat: its operands are in reverse order", backwards


def _permuted(op: Operation, order: Sequence[int], operands: Operands) -> Any:
    return op.run([operands[i] for i in order])


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
    splits = len(after) > len(before)
    few, many = (before, after) if splits else (after, before)
    start, stop = _bounds_of_split(few, many)
    # The first order is the one that the operation has.
    for order in list(permutations(range(stop - start)))[1:]:
        within = _within(order, start, len(many))
        if splits:
            sizes = [many[axis] for axis in within]
            change = partial(_split, sizes=sizes, axes=np.argsort(within).tolist())
            yield f"reshape: axis {start} is split in the order {order}", change
        else:
            change = partial(_merged, axes=within, shape=after)
            yield f"reshape: axes from {start} are merged in the order {order}", change


def _bounds_of_split(few: Sequence[int], many: Sequence[int]) -> tuple[int, int]:
    """Return between which axes of the longer shape one of the shorter is split; else 0 and 0."""
    start = next((i for i, size in enumerate(few) if size != many[i]), len(few))
    stop = start + len(many) - len(few) + 1
    group = many[start:stop]
    if start == len(few) or len(group) < 2 or min(group) < 2:
        return 0, 0
    return (start, stop) if few[start + 1 :] == many[stop:] else (0, 0)


def _within(order: Sequence[int], start: int, count: int) -> list[int]:
    """Return an order of some neighbouring axes as one of all axes."""
    stop = start + len(order)
    return [*range(start), *(start + i for i in order), *range(stop, count)]


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
        exponent = op.equation.params["y"] + 1
        yield f"pow: the exponent is {exponent}", partial(op.run, y=exponent)
    if op.primitive not in ("add", "sub", "max") or op.kind != "f":
        return
    change = partial(_times, factor=10.0)
    for i, value in op.constants():
        if 0 < abs(value) <= EPSILON:
            sentence = f"{op.name}: the constant is {10 * value:g}"
            yield sentence, on_changed(op, i, change)


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
        yield f"{op.name}: runs in the other direction", partial(op.run, reverse=not backwards)


def axis(op: Operation) -> Iterator[Variant]:
    """Reduce, accumulate or normalise along another axis."""
    if op.primitive.startswith("cum"):
        own = op.equation.params["axis"]
        for other in set(op.axes) - {own}:
            yield f"{op.name}: along axis {other}", partial(op.run, axis=other)
    if op.primitive.startswith(("reduce_", "arg")) and len(op.given) == 1:
        yield from _reduced_axes(op)
    summed = _normalised(op)
    if summed:
        for other in set(op.axes) - summed:
            run = partial(_normalise, axis=other)
            yield f"normalised along axis {other} in place of {min(summed)}", run


def _reduced_axes(op: Operation) -> Iterator[Variant]:
    """Reduce along another axis of the same size."""
    sizes = op.given[0].shape
    axes = op.equation.params.get("axes", ())
    others = [axis for axis in range(len(sizes)) if axis not in axes]
    for own in axes:
        for other in others:
            if sizes[other] == sizes[own]:
                changed = {*axes, other} - {own}
                run = partial(op.run, axes=tuple(sorted(changed)))
                yield f"{op.name}: along axis {other} in place of {own}", run


def _normalised(op: Operation) -> set[int]:
    """Return the axes of the sum of the dividend that it is divided by, as in a softmax."""
    if op.primitive != "div":
        return set()
    dividend, divisor = op.equation.invars
    if isinstance(divisor, Literal):
        return set()
    maker = op.makers.get(divisor)
    # The sum is laid out like the dividend before it divides.
    while maker is not None and maker.primitive.name in ("broadcast_in_dim", "reshape"):
        maker = op.makers.get(maker.invars[0])
    if maker is None or maker.primitive.name != "reduce_sum":
        return set()
    return set(maker.params["axes"]) if maker.invars[0] is dividend else set()


def _normalise(operands: Operands, axis: int) -> Any:
    return operands[0] / jnp.sum(operands[0], axis=axis, keepdims=True)


def off_by_one(op: Operation) -> Iterator[Variant]:
    """Shift a bound, an index, a position or a padding by one."""
    if op.primitive in NEXT:
        name, compare = NEXT[op.primitive]
        yield f"{op.name}: is {name}", lambda given: compare(*given)
    if op.primitive == "iota" and op.kind in "if":
        yield "iota: counts from 1", after(_one_more, op)
    if op.primitive in ("gather", "dynamic_slice"):
        # The first operand is what is read, all others are where.
        for i, aval in enumerate(op.given):
            if i > 0 and jnp.issubdtype(aval.dtype, jnp.integer):
                yield f"{op.name}: index {i} is one more", on_changed(op, i, _one_more)
    if op.primitive == "slice":
        yield from _bounds(op)
    if op.primitive == "conv_general_dilated":
        yield from _paddings(op)


def _one_more(x: Any) -> Any:
    return x + 1


def _bounds(op: Operation) -> Iterator[Variant]:
    params = op.equation.params
    starts, stops = params["start_indices"], params["limit_indices"]
    for axis, size in enumerate(op.given[0].shape):
        for step in (-1, 1):
            start = starts[axis] + step
            stop = stops[axis] + step
            if start < 0 or stop > size:
                continue
            changed_starts = _replaced(starts, axis, start)
            changed_stops = _replaced(stops, axis, stop)
            run = partial(op.run, start_indices=changed_starts, limit_indices=changed_stops)
            yield f"slice: starts at {start} of axis {axis}, not {starts[axis]}", run


def _paddings(op: Operation) -> Iterator[Variant]:
    paddings = op.equation.params["padding"]
    for i, (low, high) in enumerate(paddings):
        if high > 0:
            shifted = (low + 1, high - 1)
            run = partial(op.run, padding=_replaced(paddings, i, shifted))
            yield f"conv: padding {i} is {shifted} in place of {(low, high)}", run


def _replaced(values: Sequence[Any], i: int, value: Any) -> tuple[Any, ...]:
    return (*values[:i], value, *values[i + 1 :])


def other(op: Operation) -> Iterator[Variant]:
    """Compute another function: the smallest for the largest, a sine for a cosine."""
    if op.kind != "f":
        return
    if op.primitive in OTHERS:
        name, function = OTHERS[op.primitive]
        yield f"{name} in place of {op.name}", lambda given: function(*given)
    if op.primitive in REDUCTIONS:
        name, reduction = REDUCTIONS[op.primitive]
        reduce = partial(reduction, axis=tuple(op.equation.params["axes"]))
        yield f"{name} in place of {op.name}", lambda given: reduce(given[0])


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
