"""The product of a few rows with a matrix, read at the rate of memory, and its derivatives.

It is a primitive, because only a primitive has a transpose: it is linear in either factor, as
`jax.lax.dot_general` is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching
from jaxtyping import Array

from flax_attn.native import DTYPES, library, target
from flax_attn.native.primitive import primitive

# Rows at most: beyond, multiplying takes longer than reading, and XLA multiplies well.
FEW = 16


def takes(
    x: Array,
    matrix: Array,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    **others: Any,
) -> bool:
    """Return whether `product` computes `x (m, d_in) @ matrix`.

    Options are those of `jax.lax.dot_general`.

    Sums are in float32: more than any precision asks for, but not what an algorithm asks for.
    """
    if (
        library() is None
        or any(option is not None for option in others.values())
        or is_algorithm(precision)
    ):
        return False
    if x.dtype.name not in DTYPES or preferred_element_type not in (None, x.dtype, jnp.float32):
        return False
    rows = x.shape[0]
    # Of a batch that is symbolic nobody knows.
    few = isinstance(rows, int) and 0 < rows <= FEW
    return x.dtype == matrix.dtype and few and matrix.size > 0


def product(
    x: Array,
    matrix: Array,
    contracted: int,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    **none: None,
) -> Array:
    """Return `x @ matrix`, or `x @ matrix^T` if axis 1 is contracted; options are those of `takes`.

    Shapes:
        `(m, d_in)` and `(d_in, d_out)` or `(d_out, d_in)` to `(m, d_out)`.

    Example:
        >>> if library():
        ...     assert product(jnp.ones((2, 3)), jnp.ones((3, 5)), 0).shape == (2, 5)
    """
    dtype = jnp.dtype(preferred_element_type or x.dtype)
    return _product.bind(x, matrix, contracted=contracted, precision=precision, dtype=dtype)


def is_algorithm(precision: Any) -> bool:
    """Return whether a precision, or the default where it is None, is an algorithm.

    Example:
        >>> is_algorithm("highest"), is_algorithm("BF16_BF16_F32")
        (False, True)
    """
    default = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    try:
        for part in precision if isinstance(precision, tuple) else (precision or default,):
            jax.lax.Precision(part)
    except ValueError:
        return True
    return False


def _plain(x: Array, matrix: Array, *, contracted: int, precision: Any, dtype: Any) -> Array:
    numbers = ((1,), (contracted,)), ((), ())
    return jax.lax.dot_general(
        x, matrix, numbers, precision=precision, preferred_element_type=dtype
    )


def _call(x: Array, matrix: Array, *, contracted: int, precision: Any, dtype: Any) -> Array:
    result = jax.ShapeDtypeStruct((x.shape[0], matrix.shape[1 - contracted]), dtype)
    call = jax.ffi.ffi_call(target("matrix_product"), result)
    return call(x, matrix, transposed=contracted == 1)


def _jvp(primals, tangents, **params):
    x, matrix = primals
    dx, d_matrix = tangents
    multiply = partial(_product.bind, **params)
    # A factor that does not change would be multiplied as zeros.
    changes = []
    if type(dx) is not ad.Zero:
        changes.append(multiply(dx, matrix))
    if type(d_matrix) is not ad.Zero:
        changes.append(multiply(x, d_matrix))
    change, *others = changes
    return multiply(x, matrix), sum(others, change)


def _transpose(cotangent, *factors, **params):
    i = next(i for i, factor in enumerate(factors) if ad.is_undefined_primal(factor))

    def linear(factor):
        x, matrix = (factor if j == i else other for j, other in enumerate(factors))
        return _plain(x, matrix, **params)

    (gradient,) = jax.linear_transpose(linear, factors[i].aval)(ad.instantiate_zeros(cotangent))
    return [gradient if j == i else None for j in range(2)]


def _batch(factors, dims, **params):
    x, matrix = factors
    batched, other = dims
    # A matrix for each: nothing is read twice, and XLA reads as quickly.
    if other is not None:
        of_each = jax.vmap(partial(_plain, **params), dims)
        return of_each(x, matrix), 0
    x = jnp.moveaxis(x, batched, 0)
    b, m, d = x.shape
    rows = x.reshape(b * m, d)
    # All rows have one matrix; together they may be too many for the library.
    multiply = _product.bind if 0 < len(rows) <= FEW else _plain
    result = multiply(rows, matrix, **params)
    _, width = result.shape
    return result.reshape(b, m, width), 0


_product = primitive("native_product", _call, _plain, ("contracted", "precision", "dtype"))
ad.primitive_jvps[_product] = _jvp
ad.primitive_transposes[_product] = _transpose
batching.primitive_batchers[_product] = _batch
