"""What replacements ask of the arrays and the layers of other libraries."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.everywhere.target import LeftAlone


def check_floats(*arrays: Any) -> None:
    """Raise `LeftAlone` unless all arrays hold floating-point numbers of 16 bits or more.

    A layer asks before it projects them, and so does nothing that the original would do again.
    """
    for array in arrays:
        # Kernels take no 8 bits: other libraries scale such arrays by hand, or use them by mistake.
        dtype = jnp.result_type(array)
        if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize == 1:
            raise LeftAlone(f"it computes with {dtype.name}")


def promoted(*arrays: Array) -> list[Array]:
    """Return arrays in the dtype that JAX would multiply them in."""
    dtype = jnp.result_type(*arrays)
    return [x.astype(dtype) for x in arrays]


def class_name(part: Any) -> str:
    """Return the module and the name of the class of a part that a layer holds."""
    return f"{type(part).__module__}.{type(part).__name__}"
