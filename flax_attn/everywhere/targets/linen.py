"""`flax.linen.dot_product_attention`, which `linen.MultiHeadDotProductAttention` calls."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.everywhere.core import arguments
from flax_attn.everywhere.flax_attention import (
    dot_product_attention_weights,
    flax_attention,
    multi_head_attention,
)
from flax_attn.everywhere.target import LeftAlone, Place, Target

# Arguments by which a caller replaces the two products, with quantized ones for example.
_PRODUCTS = "einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum"


def dot_product_attention(original: Callable, *args: Any, **kwargs: Any) -> Array:
    """Return what `linen.dot_product_attention` returns.

    Its softmax is in the dtype of the inputs, also in bfloat16; here it is in float32 at least.
    """
    call = arguments(original, *args, **kwargs)
    for name in _PRODUCTS:
        if call.pop(name, None) is not None:
            raise LeftAlone(f"its products are computed by {name} of the caller")
    # Here fewer heads of keys would be shared by the queries.
    query_heads = jnp.shape(call["query"])[-2:-1]
    key_heads = jnp.shape(call["key"])[-2:-1]
    if query_heads != key_heads:
        raise LeftAlone("query and key have different numbers of heads, which Linen refuses")
    return flax_attention(**call)


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
