"""Norms and gates of attention heads."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from flax_attn.functional.dtypes import accumulation_dtype

Norm = Callable[[Array], Array]
GATES = ("features", "heads")


def norm_heads(norm: Norm | None, x: Float[Array, "*b t n h"]) -> Float[Array, "*b t n h"]:
    """Return heads after a norm over each head, or over all heads joined.

    The norm is over each head if it is as wide as one, and over all heads joined otherwise.

    Args:
        norm: norm over the last axis; None is no norm.
        x: queries or keys.

    Example:
        >>> from flax_attn import RMSNorm
        >>> x = jnp.arange(1.0, 7.0).reshape(1, 2, 3)
        >>> each, together = (norm_heads(RMSNorm(width), x) for width in (3, 6))
        >>> bool(jnp.allclose(each, together))
        False
    """
    if norm is None:
        return x
    # By the width, as OLMo 2 has one norm over all heads where Qwen 3 has one over each.
    if getattr(norm, "d_model", None) == x.shape[-1]:
        return norm(x)
    joined = rearrange(x, "... n h -> ... (n h)")
    return rearrange(norm(joined), "... (n h) -> ... n h", n=x.shape[-2])


def gate_heads(
    gate: Float[Array, "*b t gates"], x: Float[Array, "*b t n h"]
) -> Float[Array, "*b t n h"]:
    """Return `sigmoid(gate) * x`, the sigmoid in at least float32.

    Args:
        gate: logits of the gate, `n` for one for each head, or `n * h` for one for each feature.
        x: output of the heads.

    Example:
        >>> gate_heads(jnp.zeros((1, 2)), jnp.ones((1, 2, 3))).tolist()
        [[[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]]

    References:
        Qiu et al. 2025 (arXiv:2505.06708).
    """
    wide = accumulation_dtype(x.dtype)
    opened = jax.nn.sigmoid(rearrange(gate, "... t (n h) -> ... t n h", n=x.shape[-2]).astype(wide))
    return (jnp.broadcast_to(opened, x.shape) * x.astype(wide)).astype(x.dtype)
