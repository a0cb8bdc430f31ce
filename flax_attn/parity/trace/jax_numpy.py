"""Operations of JAX evaluated in NumPy, which compiles nothing; the others by JAX itself."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy import special

from flax_attn.parity.jaxprs import bind

Arrays = Sequence[np.ndarray]
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


def _transpose(params: Mapping[str, Any], operands: Arrays) -> np.ndarray:
    return np.transpose(operands[0], params["permutation"])


def _reshape(params: Mapping[str, Any], operands: Arrays) -> np.ndarray:
    return np.reshape(operands[0], params["new_sizes"])


def _squeeze(params: Mapping[str, Any], operands: Arrays) -> np.ndarray:
    return np.squeeze(operands[0], tuple(params["dimensions"]))


def _expand(params: Mapping[str, Any], operands: Arrays) -> np.ndarray:
    return np.expand_dims(operands[0], tuple(params["dimensions"]))


def _broadcast(params: Mapping[str, Any], operands: Arrays) -> np.ndarray:
    shape, kept = params["shape"], params["broadcast_dimensions"]
    x = operands[0]
    spread = [1] * len(shape)
    for axis, size in zip(kept, x.shape, strict=True):
        spread[axis] = size
    return np.broadcast_to(x.reshape(spread), shape)


def _concatenate(params: Mapping[str, Any], operands: Arrays) -> np.ndarray:
    return np.concatenate(operands, params["dimension"])


def _slice(params: Mapping[str, Any], operands: Arrays) -> np.ndarray:
    steps = params["strides"] or [1] * len(params["start_indices"])
    bounds = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    return operands[0][tuple(slice(*bound) for bound in bounds)]


def _reverse(params: Mapping[str, Any], operands: Arrays) -> np.ndarray:
    return np.flip(operands[0], tuple(params["dimensions"]))


def _select(params: Mapping[str, Any], operands: Arrays) -> np.ndarray:
    which, *cases = operands
    if which.dtype != bool:
        return np.choose(which, cases)
    return np.where(which, cases[1], cases[0])


def _reduce(name: str) -> Callable[[Mapping[str, Any], Arrays], np.ndarray]:
    function = REDUCTIONS[name]
    return lambda params, operands: function(operands[0], axis=tuple(params["axes"]))


def _power(params: Mapping[str, Any], operands: Arrays) -> np.ndarray:
    return operands[0] ** params["y"]


def _cumulative(name: str) -> Callable[[Mapping[str, Any], Arrays], np.ndarray]:
    function = CUMULATIVE[name]

    def accumulated(params: Mapping[str, Any], operands: Arrays) -> np.ndarray:
        axis = params["axis"]
        if not params["reverse"]:
            return function(operands[0], axis=axis)
        return np.flip(function(np.flip(operands[0], axis), axis=axis), axis)

    return accumulated


def _iota(params: Mapping[str, Any], operands: Arrays) -> np.ndarray:
    shape, axis = params["shape"], params["dimension"]
    along = np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return np.broadcast_to(along, shape)


def _cast(params: Mapping[str, Any], operands: Arrays) -> np.ndarray:
    return operands[0].astype(params["new_dtype"])


def _dot(params: Mapping[str, Any], operands: Arrays) -> np.ndarray:
    (left_sum, right_sum), (left_batch, right_batch) = params["dimension_numbers"]
    left, left_free = _as_matrices(operands[0], left_batch, left_sum, last=True)
    right, right_free = _as_matrices(operands[1], right_batch, right_sum, last=False)
    batch = tuple(operands[0].shape[axis] for axis in left_batch)
    return np.matmul(left, right).reshape(batch + left_free + right_free)


def _as_matrices(
    x: np.ndarray, batch: Sequence[int], summed: Sequence[int], last: bool
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return an array as matrices with the summed axes last or first, and its free sizes."""
    free = [axis for axis in range(x.ndim) if axis not in batch and axis not in summed]
    order = [*batch, *free, *summed] if last else [*batch, *summed, *free]
    sizes = tuple(x.shape[axis] for axis in free)
    rows = int(np.prod([x.shape[axis] for axis in free], dtype=int))
    inner = int(np.prod([x.shape[axis] for axis in summed], dtype=int))
    batches = [x.shape[axis] for axis in batch]
    shape = [*batches, rows, inner] if last else [*batches, inner, rows]
    return np.transpose(x, order).reshape(shape), sizes


RULES: dict[str, Callable[[Mapping[str, Any], Arrays], np.ndarray]] = {
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "expand_dims": _expand,
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "slice": _slice,
    "rev": _reverse,
    "select_n": _select,
    "integer_pow": _power,
    "convert_element_type": _cast,
    "dot_general": _dot,
    "iota": _iota,
    **{name: _reduce(name) for name in REDUCTIONS},
    **{name: _cumulative(name) for name in CUMULATIVE},
}


def function_of(eqn: Any) -> Callable[[Arrays], list[np.ndarray]]:
    """Return a function of the operands that computes the results of an operation of a jaxpr.

    NumPy computes what it computes as JAX does, in the dtypes that it has; JAX the rest.
    """
    if eqn.primitive.name == "split":
        return _split(eqn)
    rule = _rule_of(eqn)
    dtypes = [getattr(x.aval, "dtype", None) for x in [*eqn.invars, *eqn.outvars]]
    known = all(_of_numpy(dtype) for dtype in dtypes)
    if rule is None or not known:
        return _bound(eqn)
    shape, dtype = eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype

    def function(operands: Arrays) -> list[np.ndarray]:
        with np.errstate(all="ignore"):
            value = np.asarray(rule(operands), dtype)
        return [value.reshape(shape)]

    return function


def _split(eqn: Any) -> Callable[[Arrays], list[np.ndarray]]:
    bounds = np.cumsum(eqn.params["sizes"])[:-1]
    return lambda operands: np.split(operands[0], bounds, eqn.params["axis"])


def _rule_of(eqn: Any) -> Callable[[Arrays], Any] | None:
    name, params = eqn.primitive.name, eqn.params
    if name in ELEMENTWISE:
        elementwise = ELEMENTWISE[name]
        return lambda operands: elementwise(*operands)
    if name == "div" and eqn.outvars[0].aval.dtype.kind == "f":
        return lambda operands: operands[0] / operands[1]
    if name == "rsqrt":
        return lambda operands: 1 / np.sqrt(operands[0])
    if name == "logistic":
        return lambda operands: 1 / (1 + np.exp(-operands[0]))
    if name in RULES:
        rule = RULES[name]
        return lambda operands: rule(params, operands)
    return None


def _of_numpy(dtype: Any) -> bool:
    # NumPy rounds a function in float32 otherwise than XLA; keys and ml_dtypes are not its own.
    return isinstance(dtype, np.dtype) and (dtype.kind in "biu" or dtype == np.float64)


def _bound(eqn: Any) -> Callable[[Arrays], list[np.ndarray]]:
    # What JAX takes, it takes from NumPy as well; a value of PyTorch may have another dtype.
    kinds = [getattr(atom.aval, "dtype", None) for atom in eqn.invars]

    def function(operands: Arrays) -> list[np.ndarray]:
        given = [_cast_to(x, kind) for x, kind in zip(operands, kinds, strict=True)]
        return [_as_numpy(result) for result in bind(eqn, given)]

    return function


def _cast_to(x: Any, kind: Any) -> Any:
    return x.astype(kind) if isinstance(x, np.ndarray) and isinstance(kind, np.dtype) else x


def _as_numpy(value: Any) -> Any:
    # A key of a random function stays what it is.
    key = jnp.issubdtype(value.dtype, jnp.inexact) or jnp.issubdtype(value.dtype, jnp.integer)
    return np.asarray(value) if key or value.dtype == bool else value
