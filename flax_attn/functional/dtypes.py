"""The dtype that sums, means and softmaxes are taken in, and what dtypes are called and hold."""

import jax.numpy as jnp
from flax.typing import Dtype


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Return float32 for narrower dtypes, and the dtype itself for float32 and float64.

    Example:
        >>> accumulation_dtype(jnp.dtype("bfloat16")), accumulation_dtype(jnp.dtype("float64"))
        (dtype('float32'), dtype('float64'))
    """
    return jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype


def dtype_name(dtype: Dtype) -> str:
    """Return the name of a dtype, the same in both packages.

    Example:
        >>> dtype_name(jnp.bfloat16)
        'bfloat16'
    """
    return jnp.dtype(dtype).name


def is_integer(dtype: Dtype) -> bool:
    """Return whether a dtype is one of integers, signed or not.

    Example:
        >>> is_integer(jnp.uint8), is_integer(jnp.bool)
        (True, False)
    """
    return bool(jnp.issubdtype(dtype, jnp.integer))
