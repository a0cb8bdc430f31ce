"""Slices of arrays at traced indices, which are int32 whatever the default."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

Indices = Sequence[Array | int]


def take(array: Array, at: Indices, shape: Sequence[int]) -> Array:
    """Return the part of that shape that begins at `at`."""
    return lax.dynamic_slice(array, _int32(at), shape)


def put(array: Array, part: Array, at: Indices) -> Array:
    """Return the array with the part written over that position."""
    return lax.dynamic_update_slice(array, part.astype(array.dtype), _int32(at))


def add(array: Array, part: Array, at: Indices) -> Array:
    """Return the array with the part added at that position."""
    return put(array, take(array, at, part.shape) + part.astype(array.dtype), at)


def add_as(total: Array, part: Array) -> Array:
    """Return the total and a part of it, in the dtype of the total."""
    return total + part.astype(total.dtype)


def _int32(at: Indices) -> list[Array]:
    return [jnp.asarray(index, jnp.int32) for index in at]
