"""Slices of arrays at places known only when the program runs; all indices int32, whatever the default."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

Place = Sequence[Array | int]


def take(array: Array, at: Place, shape: Sequence[int]) -> Array:
    """Return the part of that shape that begins at `at`."""
    return lax.dynamic_slice(array, _int32(at), shape)


def put(array: Array, part: Array, at: Place) -> Array:
    """Return the array with the part in place of what stood there."""
    return lax.dynamic_update_slice(array, part.astype(array.dtype), _int32(at))


def add(array: Array, part: Array, at: Place) -> Array:
    """Return the array with the part added to what stands there."""
    return put(array, take(array, at, part.shape) + part.astype(array.dtype), at)


def _int32(at: Place) -> list[Array]:
    return [jnp.asarray(index, jnp.int32) for index in at]
