"""What the constructors of masks take, checked."""

from numbers import Integral
from typing import Any, overload

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from flax_attn.functional.mask_part import Count
from flax_attn.functional.shapes import ArrayLike


def as_booleans(array: Any) -> Array:
    """Return a boolean array, or raise `ValueError`."""
    array = jnp.asarray(array)
    if array.dtype != bool:
        raise ValueError(
            f"mask must be boolean, True = attend; got dtype {array.dtype}. "
            "To add numbers to the scores pass them as bias; for 0/1 integers write mask.astype(bool)"
        )
    return array


@overload
def as_integers(name: str, values: None) -> None: ...


@overload
def as_integers(name: str, values: Count | ArrayLike) -> Count: ...


@overload
def as_integers(name: str, values: Count | ArrayLike | None) -> Count | None: ...


def as_integers(name: str, values: Any) -> int | Array | None:
    """Return an integer or None as it is, and all else as an array of integers, or raise `ValueError`."""
    if values is None or (isinstance(values, Integral) and not isinstance(values, bool)):
        return values if values is None else int(values)
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, np.integer):
        raise ValueError(f"{name} must be integers; got dtype {values.dtype}. Cast them before the call")
    return values
