"""Attention for models of other libraries, passed by hand where they take a function.

`flax_attn.everywhere` needs none of them: it computes these models as they are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jaxtyping import Array

from flax_attn.everywhere.dispatch import at
from flax_attn.everywhere.flax_attention import flax_attention
from flax_attn.everywhere.target import LeftAlone

__all__ = ["flax"]


def flax(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: jax.lax.PrecisionLike = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Callable | None = None,
    attn_weights_value_einsum: Callable | None = None,
    is_causal: bool = False,
) -> Array:
    """Attention as an `attention_fn` of Flax, for modules of nnx and of Linen.

    It means what `nnx.dot_product_attention` and `linen.dot_product_attention` mean, and takes what
    their modules pass; with the same key dropout drops other weights, in the same distribution.

    Shapes:
        query `[batch..., t, n, h]`, key and value `[batch..., s, k, h]`, k dividing n; bias and
        mask broadcasting to `[batch..., n, t, s]`.
        Returns `[batch..., t, n, h]`.

    Raises:
        ValueError: if the products are to be computed by functions of the caller, or where
            `dot_product_attention` raises.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = nnx.MultiHeadAttention(
        ...     2, 6, attention_fn=flax, decode=False, rngs=nnx.Rngs(0)
        ... )
        >>> layer(jnp.ones((3, 5, 6)), is_causal=True).shape
        (3, 5, 6)
    """
    if qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None:
        raise ValueError(
            "flax_attn.adapters.flax computes the products itself; got functions for them, as a"
            " module passes them for qk_attn_weights_einsum_cls and attn_weights_value_einsum_cls."
            " Leave these out, or leave attention_fn at its default"
        )
    arrays = query, key, value, bias, mask
    options = broadcast_dropout, dropout_rng, dropout_rate, deterministic, dtype, precision, module
    attend = partial(flax_attention, *arrays, *options)
    try:
        with at("flax_attn.adapters.flax"):
            return attend(force_fp32_for_softmax=force_fp32_for_softmax, is_causal=is_causal)
    except LeftAlone as refusal:
        raise ValueError(str(refusal)) from refusal
