"""`flax.nnx.dot_product_attention`, which `nnx.MultiHeadAttention` calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

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
    promote_dtype: Callable | None = None,
    is_causal: bool = False,
) -> Array:
    """Return what `nnx.dot_product_attention` returns.

    Without dropout and weights the original calls `jax.nn.dot_product_attention`, without the
    precision, and so does not heed it; here it is heeded.
    """
    from flax import nnx

    promote = promote_dtype or nnx.nn.dtypes.promote_dtype
    query, key, value = promote((query, key, value), dtype=dtype)
    with refusals():
        dropout = dropout_of(
            dropout_rate, dropout_rng, deterministic=deterministic, broadcast=broadcast_dropout
        )
    sow = None
    if module is not None:
        sow = partial(module.sow, nnx.Intermediate, "attention_weights")
    call = {"is_causal": is_causal, "dropout": dropout, "precision": precision, "sow": sow}
    return flax_attention(query, key, value, bias, mask, **call)


def dot_product_attention_weights(original: Callable, *args: Any, **kwargs: Any) -> Array:
    """Leave alone what returns the weights: they are what others save."""
    raise LeftAlone("it returns all weights, so that there is nothing to save")


def multi_head_attention(original: Callable, module: Any, *args: Any, **kwargs: Any) -> Array:
    """Call a module, and note an attention function that is not Flax's."""
    note(module.attention_fn)
    return original(module, *args, **kwargs)


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
