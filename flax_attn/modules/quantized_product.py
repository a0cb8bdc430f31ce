"""The product of rows with matrices that are held in 8 or 4 bits, read as they are held.

Only in flax_attn: PyTorch widens the matrix, and multiplies then.
"""

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

# The dtype of the scales beside each dtype of numbers.
_SCALES = {"int8": jnp.float32, "float8_e4m3fn": jnp.float32, "uint8": jnp.uint8}
# A block is as wide as a multiple of it, or as the matrix: no vector has numbers of two blocks.
_STEP = 32


def is_few(x: Array) -> bool:
    """Return whether rows `(m, d_in)` are so few that reading a matrix takes longest."""
    rows = x.shape[0]
    # Of a batch that is symbolic nobody knows.
    return isinstance(rows, int) and 0 < rows <= FEW


def takes(x: Array, matrix: QuantizedMatrix, precision: Any = None) -> bool:
    """Return whether `quantized_product` computes the product of rows, with sums in float32."""
    if library() is None or is_algorithm(precision):
        return False
    # Scales in float64 are those of a model in float64.
    wanted = _SCALES.get(matrix.weight.dtype.name)
    if x.dtype.name not in DTYPES or matrix.scale.dtype != wanted:
        return False
    _, width = matrix.block
    whole = width % _STEP == 0 or width >= matrix.d_in
    # Of two numbers in a byte the scalar end of a row has none.
    pairs = wanted == jnp.uint8
    even = not pairs or matrix.d_in % _STEP == 0
    some = x.size > 0 and matrix.weight.size > 0
    return whole and even and some


def quantized_product(
    x: Array,
    matrix: QuantizedMatrix,
    sizes: Array | None = None,
    *,
    precision: Any = None,
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
    x: Array,
    matrix: QuantizedMatrix,
    sizes: Array | None = None,
    *,
    precision: Any = None,
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
    options = {
        "precision": precision,
        "preferred_element_type": dtype,
    }
    if sizes is not None:
        matrices = matrix.kernels(x.dtype)
        return jax.lax.ragged_dot(x, matrices, sizes, **options)
    height, width = matrix.block
    by_row = height == 1 and width >= matrix.d_in
    if not by_row or matrix.weight.dtype == jnp.uint8:
        kernel = matrix.kernels(x.dtype)
        return jnp.matmul(x, kernel, **options)
    numbers = matrix.weight.astype(x.dtype)
    sums = jnp.matmul(x, numbers.mT, **options)
    scale = matrix.scale.astype(dtype).mT
    return sums * jnp.broadcast_to(scale, sums.shape)


def _plain(
    x: Array,
    weight: Array,
    scale: Array,
    *sizes: Array,
    block: tuple,
    dtype: Any,
    precision: Any,
) -> Array:
    matrix = QuantizedMatrix(weight, scale, block, dtype)
    return plain_product(x, matrix, *sizes, precision=precision)


def _call(x: Array, weight: Array, *others: Array, block: tuple, **options: Any) -> Array:
    # The other options are for plain JAX: the library sums in float32.
    height, width = map(np.int64, block)
    m, _ = x.shape
    d_out = weight.shape[-2]
    result = jax.ShapeDtypeStruct((m, d_out), jnp.float32)
    name = target("quantized_product")
    call = jax.ffi.ffi_call(name, result)
    return call(x, weight, *others, block_out=height, block_in=width)


def _jvp(primals, tangents, **static):
    _, *others = primals
    # What is held does not change.
    dx = ad.instantiate_zeros(tangents[0])
    product = _product.bind(*primals, **static)
    return product, _plain(dx, *others, **static)


_product = primitive("native_quantized_product", _call, _plain, ("block", "dtype", "precision"))
ad.primitive_jvps[_product] = _jvp
batch_by_mapping(_product, _plain)
