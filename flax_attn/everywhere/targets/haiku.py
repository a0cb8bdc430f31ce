"""`haiku.MultiHeadAttention`."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.everywhere.core import attend
from flax_attn.everywhere.flax_attention import Flat
from flax_attn.everywhere.operands import check_floats, promoted
from flax_attn.everywhere.target import LeftAlone, Place, Target
from flax_attn.everywhere.words import asked_for


def multi_head_attention(
    original: Callable,
    module: Any,
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
) -> Array:
    """Return what a call of `haiku.MultiHeadAttention` returns."""
    # All is refused before modules are made: the original would make others of the same names.
    check_floats(query, key, value)
    leading, t, s = query.shape[:-2], query.shape[-2], key.shape[-2]
    if not leading == key.shape[:-2] == value.shape[:-2]:
        raise LeftAlone("query, key and value have different leading axes")
    if mask is not None:
        mask = jnp.asarray(mask).astype(bool)
        _check_mask(mask, (*leading, module.num_heads, t, s))
    query = module._linear_projection(query, module.key_size, "query")
    key = module._linear_projection(key, module.key_size, "key")
    value = module._linear_projection(value, module.value_size, "value")
    # Without leading axes there is a batch of one all the same.
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in promoted(query, key, value))
    asked = asked_for(query, key, mask=mask)
    if mask is not None:
        mask = Flat(leading).of(mask)
    output = attend(query, key, value, mask=mask, asked=asked).output
    heads_joined = output.reshape(*leading, t, -1)
    return _output_projection(module)(heads_joined)


def _output_projection(module: Any) -> Callable[[Array], Array]:
    """Return the last layer, which takes its name from where it is made: inside the module."""
    linear = import_module("haiku").Linear
    return linear(
        module.model_size,
        with_bias=module.with_bias,
        w_init=module.w_init,
        b_init=module.b_init,
    )


def _check_mask(mask: Array, scores: tuple[int, ...]) -> None:
    fits = zip(mask.shape, scores, strict=False)
    if mask.ndim != len(scores) or any(size not in (1, whole) for size, whole in fits):
        raise LeftAlone(f"a mask {mask.shape} does not fit the scores {scores}")


_PLACE = Place("haiku._src.attention", "MultiHeadAttention.__call__", multi_head_attention, "haiku")
TARGET = Target("haiku", "haiku", ">=0.0.10,<0.0.18", (_PLACE,), distribution="dm-haiku")
