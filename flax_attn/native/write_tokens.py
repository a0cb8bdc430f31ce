"""New tokens of a cache of 16-bit numbers, written where it lies."""

from __future__ import annotations

import jax
from jaxtyping import Array

from flax_attn.native import DTYPES, library, target


def takes(cached: Array) -> bool:
    """Return whether `write_tokens` writes into this array of a cache.

    On a mesh it is left to XLA, which knows how the cache is split.
    """
    own, set_ = jax.typeof(cached).sharding.mesh, jax.sharding.get_abstract_mesh()
    two_bytes = cached.dtype.name in DTYPES and cached.dtype.itemsize == 2
    return two_bytes and own.empty and set_.empty and library() is not None


def write_tokens(cached: Array, new: Array, slots: Array) -> Array:
    """Return an array of a cache with new tokens in it; `cached` is overwritten if XLA may.

    Shapes:
        `(b, k, s, h)`, `(b, t, k, h)` and int32 `(b, t)` to `(b, k, s, h)`.

    Example:
        >>> import jax.numpy as jnp
        >>> if library():
        ...     cached = jnp.zeros((1, 1, 3, 1), jnp.bfloat16)
        ...     new = jnp.ones((1, 1, 1, 1), jnp.bfloat16)
        ...     written = write_tokens(cached, new, jnp.array([[1]]))
        ...     assert written[0, 0, :, 0].tolist() == [0.0, 1.0, 0.0]
    """
    result = jax.ShapeDtypeStruct(cached.shape, cached.dtype)
    call = jax.ffi.ffi_call(target("write_tokens"), result, input_output_aliases={0: 0})
    return call(cached, new, slots)
