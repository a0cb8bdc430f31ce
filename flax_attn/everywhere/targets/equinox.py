"""`equinox.nn.MultiheadAttention`, and the function that it calls for each head."""

from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer
from jaxtyping import Array

from flax_attn.everywhere.core import attend, refusals
from flax_attn.everywhere.operands import check_floats, class_name, promoted
from flax_attn.everywhere.target import LeftAlone, Place, Target
from flax_attn.everywhere.words import asked_for
from flax_attn.functional.dropout import KeyedDropout

_MODULE = "equinox.nn._attention"


def multihead_attention(
    original: Callable,
    layer: Any,
    query: Array,
    key_: Array,
    value: Array,
    mask: Array | None = None,
    *,
    key: Array | None = None,
    inference: bool | None = None,
    deterministic: bool | None = None,
    process_heads: Callable | None = None,
) -> Array:
    """Return what `MultiheadAttention.__call__` returns."""
    if deterministic is not None:
        raise LeftAlone("deterministic= is deprecated; inference= says the same")
    check_floats(query, key_, value)
    if not query.ndim == key_.ndim == value.ndim == 2 or len(key_) != len(value):
        shapes = f"{query.shape}, {key_.shape} and {value.shape}"
        raise LeftAlone(f"query, key and value of shapes {shapes} do not fit")
    scores = layer.num_heads, len(query), len(key_)
    if mask is not None and mask.shape not in (scores, scores[1:]):
        raise LeftAlone(f"a mask {mask.shape} does not fit scores {scores}")
    dropout = _keyed(layer.dropout, key, inference)
    # All is refused by now: the original would project once more.
    query = layer._project(layer.query_proj, query)
    key_ = layer._project(layer.key_proj, key_)
    value = layer._project(layer.value_proj, value)
    if process_heads is not None:
        given = query, key_, value
        query, key_, value = process_heads(*given)
        _check_heads((query, key_, value), given)
    if mask is not None:
        # One for all heads has no axis of heads.
        mask = mask.reshape(1, -1, *scores[1:])
    output = _attend(query, key_, value, mask, dropout)
    heads_joined = output.reshape(len(query), -1)
    return jax.vmap(layer.output_proj)(heads_joined)


def _check_heads(heads: tuple[Array, ...], given: tuple[Array, ...]) -> None:
    """Raise `ValueError` if a function of the heads has changed their shapes."""
    shapes = [x.shape for x in heads]
    expected = [x.shape for x in given]
    if shapes != expected:
        raise ValueError(
            f"process_heads must not change the shape of the heads, {expected}; got {shapes}."
            " Return query, key and value as they are given"
        )


def dot_product_attention(
    original: Callable,
    query: Array,
    key_: Array,
    value: Array,
    mask: Array | None = None,
    dropout: Any = None,
    *,
    key: Array | None = None,
    inference: bool | None = None,
) -> Array:
    """Return what the function `dot_product_attention` returns: attention of one head."""
    check_floats(query, key_, value)
    scores = len(query), len(key_)
    if mask is not None and mask.shape != scores:
        raise LeftAlone(f"a mask {mask.shape} does not fit scores {scores}")
    if dropout is not None:
        dropout = _keyed(dropout, key, inference)
    if mask is not None:
        mask = mask[None, None]
    # The layer maps it over its heads: each call has one.
    query, key_, value = (x[:, None] for x in (query, key_, value))
    output = _attend(query, key_, value, mask, dropout)
    return output[:, 0]


def _attend(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    dropout: KeyedDropout | None,
) -> Array:
    # Equinox has no axis of batches: users map a layer over them by `jax.vmap`.
    query, key, value = (x[None] for x in promoted(query, key, value))
    if mask is not None:
        mask = mask.astype(bool)
    asked = asked_for(query, key, mask=mask, dropout=dropout)
    outputs = attend(query, key, value, mask=mask, dropout=dropout, asked=asked)
    return outputs.output[0]


def _keyed(dropout: Any, key: Array | None, inference: bool | None) -> KeyedDropout | None:
    """Return the dropout of a layer; None where it drops nothing."""
    # By name, as Equinox need not be imported where no layer of it is used.
    name = class_name(dropout)
    if name != "equinox.nn._dropout.Dropout":
        raise LeftAlone(f"its dropout is a {name}")
    if inference is None:
        inference = dropout.inference
    if isinstance(inference, Tracer) or not isinstance(dropout.p, int | float):
        raise LeftAlone("its dropout is not known before tracing")
    if inference or dropout.p == 0:
        return None
    if key is None:
        raise LeftAlone("it has no key for its dropout")
    with refusals():
        return KeyedDropout(float(dropout.p), key)


TARGET = Target(
    name="equinox",
    package="equinox",
    versions=">=0.11,<0.14",
    places=(
        Place(_MODULE, "MultiheadAttention.__call__", multihead_attention, "equinox.nn"),
        Place(_MODULE, "dot_product_attention", dot_product_attention),
    ),
)
