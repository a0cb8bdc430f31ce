"""The two routes to causal attention weights, which give the same numbers."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from flax_attn.functional.causal_mask import create_causal_mask


def causal_softmax_masked(scores: Float[Array, "*b t t"]) -> Float[Array, "*b t t"]:
    """Mask first: `softmax(scores with -inf above the diagonal)`.

    Example:
        >>> causal_softmax_masked(jnp.zeros((2, 2)))
        Array([[1. , 0. ],
               [0.5, 0.5]], dtype=float32)
    """
    masked = jnp.where(_diagonal_and_below(scores), scores, -jnp.inf)
    return jax.nn.softmax(masked, axis=-1)


def causal_softmax_renormalized(scores: Float[Array, "*b t t"]) -> Float[Array, "*b t t"]:
    """Softmax first: zero above the diagonal, then divide each row by its sum.

    Equal to `causal_softmax_masked` as long as the softmax of what is kept does not underflow: the
    sum of the hidden terms cancels. Prefer the mask: a large score above the diagonal leaves this
    route 0 / 0.

    Example:
        >>> causal_softmax_renormalized(jnp.zeros((2, 2)))
        Array([[1. , 0. ],
               [0.5, 0.5]], dtype=float32)
    """
    # What is hidden is part of this sum, and cancels below.
    weights = jax.nn.softmax(scores, axis=-1)
    kept = jnp.where(_diagonal_and_below(scores), weights, 0)
    return kept / kept.sum(axis=-1, keepdims=True)


def _diagonal_and_below(scores):
    return jnp.broadcast_to(create_causal_mask(scores.shape[-1]), scores.shape)
