"""Arrays as JAX takes them: cast by NumPy, so that no shape has a program of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn.parity.adapters.adapter import Arrays, is_floating

JaxArrays = dict[str, jax.Array]


def cast(arrays: Mapping[str, Any], dtype: str) -> JaxArrays:
    """Return arrays of JAX, floating ones in a dtype."""
    return {name: _as_jax(array, dtype) for name, array in arrays.items()}


def _as_jax(value: Any, dtype: str) -> jax.Array:
    array = np.asarray(value)
    # NumPy casts, and device_put takes what it made, without compiling a program for each shape.
    if is_floating(array):
        array = array.astype(jnp.dtype(dtype))
    return jax.device_put(array)


def cast_tree(tree: Any, dtype: str) -> Any:
    """Return a tree with its floating arrays in a dtype; it may hold keys, which NumPy has not."""

    def cast_leaf(leaf: Any) -> Any:
        return jnp.asarray(leaf, dtype) if is_floating_in_jax(leaf) else leaf

    return jax.tree.map(cast_leaf, tree)


def floating(inputs: Mapping[str, jax.Array]) -> JaxArrays:
    """Return the inputs that have gradients."""
    return {name: value for name, value in inputs.items() if is_floating_in_jax(value)}


def is_floating_in_jax(array: Any) -> bool:
    """Whether this is an array of floating-point numbers, traced ones included."""
    return hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jnp.floating)


def round_stochastically(arrays: Mapping[str, Any], factors: Callable) -> Arrays:
    """Return arrays with the floating ones multiplied by factors of about 1."""
    moved = {}
    for name, value in arrays.items():
        array = np.asarray(value)
        moved[name] = array * factors(array.shape) if is_floating(array) else array
    return moved


def zeros_like(array: jax.Array) -> jax.Array:
    """Return zeros where an array lies. NumPy makes them, which compiles nothing."""
    # An array that may move must stay one: programs are compiled for either.
    where = array.sharding if array.committed else None
    return jax.device_put(np.zeros(array.shape, array.dtype), where)


def as_extras(extras: Mapping[str, np.ndarray]) -> JaxArrays:
    """Return the arguments of a call beside its inputs."""
    found = {}
    for name, value in extras.items():
        # A key of dropout is unsigned in both frameworks.
        kind = np.uint32 if name == "dropout_key" else None
        found[name] = jax.device_put(np.array(value, kind))
    return found
