"""Rows of a batch: which of their tokens are real, and arrays of one row, or of none."""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from flax_attn.functional.shapes import ArrayLike


def real_tokens(b: int, t: int, lengths: ArrayLike | int | None) -> Bool[Array, "b t"]:
    """Return which of `t` tokens of `b` rows are real: the first `lengths` of each, `(b,)`; None is all.

    Example:
        >>> real_tokens(2, 3, jnp.array([2, 0])).tolist()
        [[True, True, False], [False, False, False]]
    """
    counts = jnp.broadcast_to(jnp.asarray(t if lengths is None else lengths, jnp.int32), (b,))
    return jnp.arange(t, dtype=jnp.int32)[None] < counts[:, None]


def shape_of(x: Array | None) -> tuple[int, ...] | None:
    """Return the shape of an array, None where there is none.

    Example:
        >>> shape_of(None) is None
        True
    """
    return None if x is None else x.shape


def batched(x: Array | None) -> Array | None:
    """Return an array as the one row of a batch, None where there is none.

    Example:
        >>> batched(None) is None
        True
    """
    return None if x is None else x[None]
