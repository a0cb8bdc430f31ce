"""Operations of JAX evaluated in NumPy, which compiles nothing; the others by JAX itself."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy import special

from flax_attn.parity.jaxprs import bind

Arrays = Sequence[np.ndarray]
Axes = Sequence[int]
Params = Mapping[str, Any]
Rule = Callable[..., np.ndarray]
ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "abs": np.abs,
    "sign": np.sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "square": np.square,
    "is_finite": np.isfinite,
    "erf": special.erf,
    "erfc": special.erfc,
    "pow": np.power,
    "atan2": np.arctan2,
    "stop_gradient": np.positive,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    # Of booleans, and of the bits of whole numbers.
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "clamp": lambda low, x, high: np.clip(x, low, high),
}
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "reduce_sum": np.sum,
    "reduce_max": np.max,
    "reduce_min": np.min,
    "reduce_prod": np.prod,
    "reduce_and": np.all,
    "reduce_or": np.any,
}
CUMULATIVE: dict[str, Callable[..., Any]] = {
    "cumsum": np.cumsum,
    "cumprod": np.cumprod,
    "cummax": np.maximum.accumulate,
    "cummin": np.minimum.accumulate,
}


def _broadcast(params: Params, x: np.ndarray) -> np.ndarray:
    spread = [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        spread[axis] = size
    return np.broadcast_to(x.reshape(spread), params["shape"])


def _slice(params: Params, x: np.ndarray) -> np.ndarray:
    starts, stops = params["start_indices"], params["limit_indices"]
    steps = params["strides"] or [1] * len(starts)
    return x[tuple(map(slice, starts, stops, steps))]


def _select(params: Params, which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    if which.dtype != bool:
        return np.choose(which, cases)
    return np.where(which, cases[1], cases[0])


def _reduce(function: Callable[..., Any], params: Params, x: np.ndarray) -> Any:
    return function(x, axis=tuple(params["axes"]))


def _accumulate(function: Callable[..., Any], params: Params, x: np.ndarray) -> np.ndarray:
    axis = params["axis"]
    if not params["reverse"]:
        return function(x, axis=axis)
    backward = function(np.flip(x, axis), axis=axis)
    return np.flip(backward, axis)


def _iota(params: Params) -> np.ndarray:
    shape, axis = params["shape"], params["dimension"]
    spread = [1] * len(shape)
    spread[axis] = -1
    along = np.arange(shape[axis]).reshape(spread)
    return np.broadcast_to(along, shape)


def _dot(params: Params, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    (left_sum, right_sum), (left_batch, right_batch) = params["dimension_numbers"]
    left_free = _others(left, left_batch, left_sum)
    right_free = _others(right, right_batch, right_sum)
    rows = _as_matrices(left, left_batch, left_free, left_sum)
    columns = _as_matrices(right, right_batch, right_sum, right_free)
    batch = _sizes(left, left_batch)
    shape = batch + _sizes(left, left_free) + _sizes(right, right_free)
    return np.matmul(rows, columns).reshape(shape)


def _others(x: np.ndarray, batch: Axes, summed: Axes) -> list[int]:
    return [axis for axis in range(x.ndim) if axis not in batch and axis not in summed]


def _sizes(x: np.ndarray, axes: Axes) -> tuple[int, ...]:
    return tuple(x.shape[axis] for axis in axes)


def _as_matrices(x: np.ndarray, batch: Axes, rows: Axes, columns: Axes) -> np.ndarray:
    """Return an array as matrices, whose rows and columns each join some axes."""
    ordered = np.transpose(x, [*batch, *rows, *columns])
    height, width = math.prod(_sizes(x, rows)), math.prod(_sizes(x, columns))
    return ordered.reshape(*_sizes(x, batch), height, width)


# Functions of the parameters of an operation and its operands.
RULES: dict[str, Rule] = {
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
    "reshape": lambda params, x: np.reshape(x, params["new_sizes"]),
    "squeeze": lambda params, x: np.squeeze(x, tuple(params["dimensions"])),
    "expand_dims": lambda params, x: np.expand_dims(x, tuple(params["dimensions"])),
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda params, *parts: np.concatenate(parts, params["dimension"]),
    "slice": _slice,
    "rev": lambda params, x: np.flip(x, tuple(params["dimensions"])),
    "select_n": _select,
    "integer_pow": lambda params, x: x ** params["y"],
    "convert_element_type": lambda params, x: x.astype(params["new_dtype"]),
    "dot_general": _dot,
    "iota": _iota,
    **{name: partial(_reduce, function) for name, function in REDUCTIONS.items()},
    **{name: partial(_accumulate, function) for name, function in CUMULATIVE.items()},
}


def function_of(eqn: Any) -> Callable[[Arrays], list[np.ndarray]]:
    """Return a function of the operands that computes the results of an operation of a jaxpr.

    NumPy computes what it computes as JAX does, in the dtypes that it has; JAX the rest.
    """
    if eqn.primitive.name == "split":
        return _split(eqn)
    rule = _rule_of(eqn)
    dtypes = _dtypes(eqn.invars) + _dtypes(eqn.outvars)
    if rule is None or not all(map(_of_numpy, dtypes)):
        return _bound(eqn)
    return partial(_results, rule, eqn.outvars[0].aval)


def _results(rule: Rule, result: Any, operands: Arrays) -> list[np.ndarray]:
    # Infinity and NaN are values of a run, not faults of the evaluation.
    with np.errstate(all="ignore"):
        value = np.asarray(rule(*operands), result.dtype)
    return [value.reshape(result.shape)]


def _split(eqn: Any) -> Callable[[Arrays], list[np.ndarray]]:
    bounds = np.cumsum(eqn.params["sizes"])[:-1]
    return lambda operands: np.split(operands[0], bounds, eqn.params["axis"])


def _rule_of(eqn: Any) -> Rule | None:
    """Return what computes a result from the operands; None where NumPy has no such function."""
    name = eqn.primitive.name
    # JAX divides whole numbers toward zero.
    if name == "div" and eqn.outvars[0].aval.dtype.kind == "f":
        return np.divide
    if name in RULES:
        return partial(RULES[name], eqn.params)
    return ELEMENTWISE.get(name)


def _dtypes(atoms: Sequence[Any]) -> list[Any]:
    # A token has none.
    return [getattr(atom.aval, "dtype", None) for atom in atoms]


def _of_numpy(dtype: Any) -> bool:
    # NumPy rounds a function in float32 otherwise than XLA; keys and ml_dtypes are not its own.
    return isinstance(dtype, np.dtype) and (dtype.kind in "biu" or dtype == np.float64)


def _bound(eqn: Any) -> Callable[[Arrays], list[np.ndarray]]:
    # What JAX takes, it takes from NumPy as well; a value of PyTorch may have another dtype.
    dtypes = _dtypes(eqn.invars)

    def function(operands: Arrays) -> list[np.ndarray]:
        given = map(_cast_to, operands, dtypes)
        return [_as_numpy(result) for result in bind(eqn, list(given))]

    return function


def _cast_to(x: Any, dtype: Any) -> Any:
    return x.astype(dtype) if isinstance(x, np.ndarray) and isinstance(dtype, np.dtype) else x


def _as_numpy(value: Any) -> Any:
    # A key of a random function stays what it is.
    number = jnp.issubdtype(value.dtype, jnp.number)
    return np.asarray(value) if number or value.dtype == bool else value
