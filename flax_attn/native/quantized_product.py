"""The product of rows with matrices that are held in 8 or 4 bits, read as they are held."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad
from jaxtyping import Array

from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.quantized import QuantizedMatrix
from flax_attn.native import DTYPES, library, target
from flax_attn.native.primitive import batch_by_mapping, primitive
from flax_attn.native.product import FEW, is_algorithm

_WEIGHTS = ("int8", "float8_e4m3fn", "uint8")
# A block is as wide as a multiple of it, or as the matrix: no vector has numbers of two blocks.
_STEP = 32


def is_few(x: Array) -> bool:
    """Return whether rows `(m, d_in)` are so few that reading a matrix takes longest."""
    rows = x.shape[0]
    # Of a batch that is symbolic nobody knows.
    return isinstance(rows, int) and 0 < rows <= FEW


def takes(x: Array, matrix: QuantizedMatrix, precision: Any = None) -> bool:
    """Return whether `quantized_product` computes the product of rows, with sums in float32."""
    weight, (_, width) = matrix.weight, matrix.block
    dtypes = x.dtype.name in DTYPES and weight.dtype.name in _WEIGHTS
    # Scales in float64 are those of a model in float64.
    scales = matrix.scale.dtype == (jnp.uint8 if weight.dtype == jnp.uint8 else jnp.float32)
    whole = width % _STEP == 0 or width >= matrix.d_in
    of_pairs = weight.dtype != jnp.uint8 or matrix.d_in % _STEP == 0
    fits = dtypes and scales and whole and of_pairs and x.size > 0 and weight.size > 0
    return fits and library() is not None and not is_algorithm(precision)


def quantized_product(
    x: Array, matrix: QuantizedMatrix, sizes: Array | None = None, *, precision: Any = None
) -> Array:
    """Return `x @ matrix^T` in float32; it is differentiable in `x`.

    Args:
        x: rows.
        matrix: a matrix, or one for each group of rows.
        sizes: number of rows of each group, in order; rows of no group give zeros. None is a single
            matrix.
        precision: precision where the library is not called.

    Shapes:
        x `(m, d_in)`, matrix `(d_out, d_in)` or `(e, d_out, d_in)`, sizes `(e,)`, to `(m, d_out)`.

    Example:
        >>> from flax_attn.functional.quantized import to_int8
        >>> if library():
        ...     matrix = to_int8(jnp.full((5, 3), 2.0))
        ...     assert quantized_product(jnp.ones((1, 3)), matrix).round().tolist() == [[6.0] * 5]
    """
    groups = [] if sizes is None else [sizes.astype(jnp.int32)]
    static = {"block": matrix.block, "dtype": matrix.dtype, "precision": precision}
    return _product.bind(x, matrix.weight, matrix.scale, *groups, **static)


def plain_product(
    x: Array, matrix: QuantizedMatrix, sizes: Array | None = None, *, precision: Any = None
) -> Array:
    """Return `quantized_product` in plain JAX, its sums in at least float32.

    The matrix is widened to the dtype of `x`. int8 is held exactly by bfloat16, and a scale for
    each row is multiplied with the sums.

    Example:
        >>> from flax_attn.functional.quantized import to_int8
        >>> plain_product(jnp.ones((1, 2)), to_int8(jnp.ones((1, 2)))).round().tolist()
        [[2.0]]
    """
    dtype = accumulation_dtype(x.dtype)
    options = {"precision": precision, "preferred_element_type": dtype}
    if sizes is not None:
        matrices = matrix.kernels(x.dtype)
        return jax.lax.ragged_dot(x, matrices, sizes, **options)
    by_row = matrix.block[0] == 1 and matrix.block[1] >= matrix.d_in
    if not by_row or matrix.weight.dtype == jnp.uint8:
        return jnp.matmul(x, matrix.kernels(x.dtype), **options)
    sums = jnp.matmul(x, matrix.weight.astype(x.dtype).mT, **options)
    scale = matrix.scale.astype(dtype).mT
    return sums * jnp.broadcast_to(scale, sums.shape)


def _plain(
    x: Array, weight: Array, scale: Array, *sizes: Array, block: Any, dtype: Any, precision: Any
) -> Array:
    matrix = QuantizedMatrix(weight, scale, block, dtype)
    return plain_product(x, matrix, *sizes, precision=precision)


def _call(
    x: Array, weight: Array, scale: Array, *sizes: Array, block: Any, dtype: Any, precision: Any
) -> Array:
    height, width = map(np.int64, block)
    result = jax.ShapeDtypeStruct((x.shape[0], weight.shape[-2]), jnp.float32)
    call = jax.ffi.ffi_call(target("quantized_product"), result)
    return call(x, weight, scale, *sizes, block_out=height, block_in=width)


def _jvp(primals, tangents, **static):
    _, *others = primals
    # What is held does not change.
    dx = ad.instantiate_zeros(tangents[0])
    return _product.bind(*primals, **static), _plain(dx, *others, **static)


_product = primitive("native_quantized_product", _call, _plain, ("block", "dtype", "precision"))
ad.primitive_jvps[_product] = _jvp
batch_by_mapping(_product, _plain)
