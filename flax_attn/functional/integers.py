"""Integers of any dtype in one that holds all values that are looked at."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from flax_attn.functional.shapes import ArrayLike


def clipped(values: ArrayLike | int, limit: int) -> Int32[Array, "*shape"]:
    """Return integers between -1 and `limit` as they are, and others as the nearer of these two.

    Ids are compared with sizes and with each other, and lengths with positions: in a dtype of 8
    bits the larger would wrap around, and in one of 64 bits others wrap where they are made int32.

    Example:
        >>> clipped(jnp.array([7, 255], jnp.uint8), 300).tolist()
        [7, 255]
        >>> clipped(np.array([-100, 2**32 + 7]), 300).tolist()
        [-1, 300]
    """
    values = _at_least_32_bits(values)
    # An array of 64 bits may be used where they are switched off: its bounds need as many.
    enabled = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    wide = values.dtype.itemsize == 8 or enabled
    with jax.enable_x64(wide):
        inside = values.clip(_least(values.dtype), limit)
        return jnp.asarray(inside, jnp.int32)


def _at_least_32_bits(values: ArrayLike | int) -> Array | np.ndarray:
    values = values if isinstance(values, Array) else np.asarray(values)
    # The bounds may not fit into fewer bits.
    return values.astype(np.int32) if values.dtype.itemsize < 4 else values


def _least(dtype: np.dtype) -> int:
    is_signed = jnp.issubdtype(dtype, jnp.signedinteger)
    return -1 if is_signed else 0
