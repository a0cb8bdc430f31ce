"""`flax.nnx.dot_product_attention`, which `nnx.MultiHeadAttention` calls."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array

from flax_attn.everywhere.core import arguments
from flax_attn.everywhere.flax_attention import (
    dot_product_attention_weights,
    flax_attention,
    multi_head_attention,
)
from flax_attn.everywhere.target import Place, Target


def dot_product_attention(original: Callable, *args: Any, **kwargs: Any) -> Array:
    """Return what `nnx.dot_product_attention` returns.

    The original does not heed the precision where there is neither dropout nor a module; here it is
    heeded.
    """
    return flax_attention(**arguments(original, *args, **kwargs))


_MODULE = "flax.nnx.nn.attention"
TARGET = Target(
    name="nnx",
    package="flax",
    versions=">=0.12.8,<0.13",
    places=(
        Place(_MODULE, "dot_product_attention", dot_product_attention, "flax.nnx"),
        Place(_MODULE, "dot_product_attention_weights", dot_product_attention_weights),
        Place(_MODULE, "MultiHeadAttention.__call__", multi_head_attention, "flax.nnx"),
    ),
)
