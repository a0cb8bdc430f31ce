"""The arguments of mask constructors, checked and in one integer type."""

from numbers import Integral
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from attn_spec.mask_checks import check_integers, check_zeros_and_ones, read_array
from flax_attn.functional.abstract import ArrayOrShape as ArrayLike
from flax_attn.functional.dtypes import is_integer
from flax_attn.functional.kv_range import as_int32
from flax_attn.functional.mask_part import Count


def as_booleans(array: Any) -> Array:
    """Return a boolean array, also of one that is known to hold 0 and 1, or raise `ValueError`.

    Example:
        >>> as_booleans(np.array([1.0, 0.0]))
        Array([ True, False], dtype=bool)
    """
    array = _array("mask", array)
    if array.dtype != bool:
        found = _is_real(array.dtype) and _is_zeros_and_ones(array)
        check_zeros_and_ones(found, array.dtype, "astype(bool)")
        array = array.astype(bool)
    return jnp.asarray(array)


def _is_real(dtype: Any) -> bool:
    return is_integer(dtype) or bool(jnp.issubdtype(dtype, jnp.floating))


def _is_zeros_and_ones(array: Array | np.ndarray) -> bool | None:
    # With NumPy, as all operations of JAX are traced inside a trace.
    if isinstance(array, Tracer):
        return None
    values = np.asarray(array)
    ones = values == 1
    return bool((ones | (values == 0)).all() and ones.any())


@overload
def as_integers(name: str, values: Count | ArrayLike) -> Count: ...


@overload
def as_integers(name: str, values: Count | ArrayLike | None) -> Count | None: ...


def as_integers(name: str, values: Any) -> int | Array | None:
    """Return an integer or None as it is, and all else as an array of int32, or raise `ValueError`.

    What is beyond 32 bits becomes the largest or the smallest integer that is not: both are beyond
    every token.
    """
    if values is None or (isinstance(values, Integral) and not isinstance(values, bool)):
        return values if values is None else int(values)
    return as_int32(_integer_array(name, values))


def as_ids(query: Any, key: Any) -> tuple[Array, Array]:
    """Return the ids of queries and keys in one signed type, in which the same pairs are equal.

    The type is int32, or int64 for ids of 64 bits.

    Example:
        >>> as_ids(np.array([2**32 - 1, 7], np.uint32), np.array([-1, 7], np.int8))
        (Array([-2147483648,           7], dtype=int32), Array([-1,  7], dtype=int32))
    """
    query = _as_known_ids("query segments", query)
    key = query if key is None else _as_known_ids("key segments", key)
    wide = 8 * max(4, query.dtype.itemsize, key.dtype.itemsize)
    is_mixed = (query.dtype == f"uint{wide}") != (key.dtype == f"uint{wide}")
    return _signed(query, wide, is_mixed), _signed(key, wide, is_mixed)


def _signed(ids: Array, wide: int, is_mixed: bool) -> Array:
    """Return ids as signed integers; `is_mixed` if just one of queries and keys is unsigned."""
    signed = ids.astype(f"int{wide}")
    if not is_mixed:
        return signed
    least = jnp.iinfo(signed.dtype).min
    # A half of the unsigned numbers is read as negative ones, which then stand for them alone.
    is_unsigned = ids.dtype == f"uint{wide}"
    return jnp.where(signed < 0, least, signed) if is_unsigned else jnp.maximum(signed, least + 1)


def _as_known_ids(name: str, ids: Any) -> Array:
    given = _integer_array(name, ids)
    held = jnp.asarray(given)
    ends = jnp.iinfo(held.dtype)
    fits = isinstance(given, Array) or ((given >= ends.min) & (given <= ends.max)).all()
    if not fits:
        raise ValueError(
            f"{name} must fit 32 bits while jax_enable_x64 is off; got ids from {given.min()} to"
            f" {given.max()}. Number them, those of queries and keys together: np.unique(ids,"
            " return_inverse=True)[1]"
        )
    return held


def _integer_array(name: str, values: Any) -> Array | np.ndarray:
    array = _array(name, values)
    check_integers(name, bool(jnp.issubdtype(array.dtype, np.integer)), array.dtype)
    return array


def _array(name: str, values: Any) -> Array | np.ndarray:
    """Return JAX arrays and variables as JAX arrays, numbers and lists as NumPy arrays."""
    # A variable of a module, whose array may be traced.
    if hasattr(values, "__jax_array__"):
        return jnp.asarray(values)
    return values if isinstance(values, Array) else read_array(name, values, _read, Array, "JAX")


def _read(values: Any) -> Array | np.ndarray:
    traced = any(isinstance(x, Array) for x in jax.tree.leaves(values))
    return jnp.asarray(values) if traced else np.asarray(values)
