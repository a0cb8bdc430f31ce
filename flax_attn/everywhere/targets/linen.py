"""`flax.linen.dot_product_attention`, which `linen.MultiHeadDotProductAttention` calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.everywhere.attention_fn import note
from flax_attn.everywhere.core import refusals
from flax_attn.everywhere.flax_attention import dropout_of, flax_attention
from flax_attn.everywhere.target import LeftAlone, Place, Target


def dot_product_attention(
    original: Callable,
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
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable | None = None,
    qk_attn_weights_einsum: Callable | None = None,
    attn_weights_value_einsum: Callable | None = None,
) -> Array:
    """Return what `linen.dot_product_attention` returns.

    Its softmax is in the dtype of the inputs, also in bfloat16; here it is in float32 at least.
    """
    from flax.linen.dtypes import promote_dtype

    if einsum_dot_general or qk_attn_weights_einsum or attn_weights_value_einsum:
        raise LeftAlone("its products are computed by an einsum or a dot_general of the caller")
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    if query.shape[-2:-1] != key.shape[-2:-1]:
        raise LeftAlone("query and key have different numbers of heads, which Linen refuses")
    if force_fp32_for_softmax:
        # Its weights are in float32, and so is what they make of the values.
        widest = jnp.promote_types(query.dtype, jnp.float32)
        query, key, value = (x.astype(widest) for x in (query, key, value))
    with refusals():
        dropout = dropout_of(
            dropout_rate, dropout_rng, deterministic=deterministic, broadcast=broadcast_dropout
        )
    sow = None
    if module is not None:
        sow = partial(module.sow, "intermediates", "attention_weights")
    call = {"dropout": dropout, "precision": precision, "sow": sow}
    return flax_attention(query, key, value, bias, mask, **call)


def dot_product_attention_weights(original: Callable, *args: Any, **kwargs: Any) -> Array:
    """Leave alone what returns the weights: they are what others save."""
    raise LeftAlone("it returns all weights, so that there is nothing to save")


def multi_head_attention(original: Callable, module: Any, *args: Any, **kwargs: Any) -> Array:
    """Call a module, and note an attention function that is not Flax's."""
    note(module.attention_fn)
    return original(module, *args, **kwargs)


_MODULE = "flax.linen.attention"
TARGET = Target(
    name="linen",
    package="flax",
    versions=">=0.12.8,<0.13",
    places=(
        Place(_MODULE, "dot_product_attention", dot_product_attention, "flax.linen"),
        Place(
            _MODULE, "dot_product_attention_weights", dot_product_attention_weights, "flax.linen"
        ),
        Place(_MODULE, "MultiHeadDotProductAttention.__call__", multi_head_attention, "flax.linen"),
    ),
)
