"""The product of tokens with a matrix, in the form that a CPU computes fastest.

Only in flax_attn: it works around limits of XLA, and of how JAX differentiates a product.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from flax_attn.backends.platform import platform_of
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.quantized import QuantizedMatrix
from flax_attn.modules import quantized_product as held
from flax_attn.native import is_amd
from flax_attn.native import product as native
from flax_attn.sharding.axes import mesh_of
from flax_attn.sharding.products import sharded_dot_general

# Parts that the product of a single token is summed up from.
_PARTS = 16


def dot_general(x: Array, matrix: Array, dimension_numbers: Any, **options: Any) -> Array:
    """Return `jax.lax.dot_general` of tokens `(..., d)` with a matrix, contracted over d.

    Off the CPU, and under a mesh, where axes may be split over devices, it is that function itself.
    On a CPU:

    - Token axes are joined into one. With two, XLA transposes the cotangent for the gradient of the
      matrix and leaves its fastest routine: 83 instead of 193 GFLOP/s at 4 x 512 tokens of width
      768.
    - Up to 16 tokens are multiplied by `flax_attn.native`, if its library is available. A decoding
      step does little but read matrices; the library reads them at memory speed, in their own
      dtype.
    - Without the library, and in float32 on AMD processors, a single token is multiplied in 16
      parts, each with its rows of the matrix. XLA then reads 20 to 27 GB/s on a Zen 4, where the
      library reads 16 to 21.

    Example:
        >>> import jax.numpy as jnp
        >>> dot_general(jnp.ones((2, 5, 3)), jnp.ones((3, 4)), (((2,), (0,)), ((), ()))).shape
        (2, 5, 4)
    """
    return _multiply(native.takes, x, matrix, dimension_numbers, **options)


def dot_general_of_xla(x: Array, matrix: Array, dimension_numbers: Any, **options: Any) -> Array:
    """Return `dot_general` without the library: XLA computes every product.

    Example:
        >>> import jax.numpy as jnp
        >>> numbers = (((1,), (0,)), ((), ()))
        >>> dot_general_of_xla(jnp.ones((5, 3)), jnp.ones((3, 4)), numbers).shape
        (5, 4)
    """
    return _multiply(lambda *factors, **options: False, x, matrix, dimension_numbers, **options)


def quantized_matmul(
    x: Array, matrix: QuantizedMatrix, *, native: bool, precision: Any = None
) -> Array:
    """Return the product of tokens with a matrix that is held in 8 or 4 bits, in its sums' dtype.

    Up to 16 tokens are multiplied by the library on CPUs, which reads the matrix as it is held;
    else the matrix is widened to the dtype of the tokens.

    Args:
        x: tokens `(t, d_in)`; `(e, t, d_in)` for several matrices.
        matrix: matrix `(d_out, d_in)`, or several.
        native: whether the library may be called.
        precision: precision of the product, as in `jax.lax.dot_general`.

    Example:
        >>> from flax_attn.functional.quantized import to_int8
        >>> import jax.numpy as jnp
        >>> quantized_matmul(jnp.ones((5, 3)), to_int8(jnp.ones((2, 3))), native=True).shape
        (5, 2)
    """
    few = x.ndim == 2 and held.is_few(x)
    on_cpu = native and platform_of(x) == "cpu"
    if few and on_cpu and held.takes(x, matrix, precision):
        return held.quantized_product(x, matrix, precision=precision)
    return held.plain_product(x, matrix, precision=precision)


# What `set_backend` exchanges for one another.
PRODUCTS = (dot_general, dot_general_of_xla)


def _multiply(
    takes: Callable[..., bool], x: Array, matrix: Array, dimension_numbers: Any, **options: Any
) -> Array:
    if not mesh_of(x, matrix).empty:
        return sharded_dot_general(x, matrix, dimension_numbers, **options)
    if platform_of(x) != "cpu":
        return jax.lax.dot_general(x, matrix, dimension_numbers, **options)
    (_, contracted), batch = dimension_numbers
    *shape, d = x.shape
    tokens = x.reshape(-1, d)
    # In a lower dtype each part would be rounded before they are summed.
    single = tokens.shape[0] == 1 and contracted == (0,)
    divisible = single and d % _PARTS == 0 and accumulation_dtype(x.dtype) == x.dtype
    if takes(tokens, matrix, **options) and not (divisible and is_amd()):
        product = native.product(tokens, matrix, *contracted, **options)
    elif divisible:
        parts = tokens.reshape(_PARTS, 1, -1)
        rows = matrix.reshape(_PARTS, d // _PARTS, -1)
        by_part = ((2,), (1,)), ((0,), (0,))
        products = jax.lax.dot_general(parts, rows, by_part, **options)
        product = products.sum(axis=0)
    else:
        joined = ((1,), contracted), batch
        product = jax.lax.dot_general(tokens, matrix, joined, **options)
    _, *width = product.shape
    return product.reshape(*shape, *width)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def unrounded(multiply: Callable[..., Array], x: Array, matrix: Array) -> Array:
    """Return a product of a lower dtype in the dtype that sums are taken in.

    Its gradients are products of the lower dtype. Those of a plain `preferred_element_type` would
    multiply a float32 cotangent, which takes GPUs and TPUs several times as long.

    Args:
        multiply: product of tokens and a matrix that takes a `preferred_element_type`.
        x: tokens.
        matrix: matrix in the dtype of the tokens.

    Example:
        >>> import jax.numpy as jnp
        >>> ones = jnp.ones((3, 3), jnp.bfloat16)
        >>> unrounded(jnp.matmul, ones, ones).dtype
        dtype('float32')
    """
    return multiply(x, matrix, preferred_element_type=accumulation_dtype(x.dtype))


@partial(unrounded.defjvp, symbolic_zeros=True)
def _change(multiply: Callable[..., Array], primals: Any, changes: Any):
    x, matrix = primals
    dx, d_matrix = changes
    product = unrounded(multiply, x, matrix)
    # Images are no function of a parameter: without this their change, zeros, is multiplied.
    if isinstance(dx, SymbolicZero):
        moved = multiply(x, d_matrix)
    elif isinstance(d_matrix, SymbolicZero):
        moved = multiply(dx, matrix)
    else:
        moved = multiply(dx, matrix) + multiply(x, d_matrix)
    return product, moved.astype(product.dtype)
