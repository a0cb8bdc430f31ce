"""The product of a few rows with a matrix of int8, read at the rate of memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jaxtyping import Array

from flax_attn.native import DTYPES, library, target
from flax_attn.native.primitive import batch_by_mapping, primitive
from flax_attn.native.product import FEW, is_algorithm


def takes(x: Array, precision: Any = None) -> bool:
    """Return whether `int8_product` computes `x (m, d_in) @ matrix`, with sums in float32."""
    rows = x.shape[0]
    # Of a batch that is symbolic nobody knows.
    few = isinstance(rows, int) and 0 < rows <= FEW
    known = few and x.dtype.name in DTYPES
    return known and library() is not None and not is_algorithm(precision)


def int8_product(x: Array, matrix: Array, precision: Any = None) -> Array:
    """Return `x @ matrix` in float32; it is differentiable in `x`.

    Shapes:
        `(m, d_in)` and `(d_in, d_out)` to `(m, d_out)`.

    Example:
        >>> if library():
        ...     matrix = jnp.full((3, 5), 2, jnp.int8)
        ...     assert int8_product(jnp.ones((1, 3)), matrix).tolist() == [[6.0] * 5]
    """
    return _product.bind(x, matrix, precision=precision)


def plain_product(x: Array, matrix: Array, *, precision: Any) -> Array:
    """Return `x @ matrix` in plain JAX, its sums in at least float32.

    The matrix is widened to the dtype of `x`, which is exact: bfloat16 holds all of int8.

    Example:
        >>> plain_product(jnp.ones((1, 2)), jnp.ones((2, 1), jnp.int8), precision=None).tolist()
        [[2.0]]
    """
    sums = jnp.dtype(jnp.float32) if x.dtype.itemsize < 4 else x.dtype
    wide = matrix.astype(x.dtype)
    return jnp.matmul(x, wide, precision=precision, preferred_element_type=sums)


def _call(x: Array, matrix: Array, *, precision: Any) -> Array:
    result = jax.ShapeDtypeStruct((x.shape[0], matrix.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(target("int8_product"), result)(x, matrix)


def _jvp(primals, tangents, *, precision):
    x, matrix = primals
    # Integers have no tangent, so that it is that of x.
    dx = ad.instantiate_zeros(tangents[0])
    return _product.bind(x, matrix, precision=precision), plain_product(
        dx, matrix, precision=precision
    )


_product = primitive("native_int8_product", _call, plain_product, ("precision",))
ad.primitive_jvps[_product] = _jvp
batch_by_mapping(_product, plain_product)
