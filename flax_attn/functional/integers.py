"""Integers of any dtype in one that holds all values that are looked at."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from flax_attn.functional.kv_range import within_int32
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
    values = values if isinstance(values, Array) else np.asarray(values)
    return jnp.asarray(within_int32(values).clip(-1, limit))
