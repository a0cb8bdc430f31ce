"""`keras.layers.MultiHeadAttention` and `GroupedQueryAttention`, and `dot_product_attention`."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.everywhere.core import attend
from flax_attn.everywhere.empty_rows import empty_rows, fill_rows
from flax_attn.everywhere.operands import check_floats, class_name, promoted
from flax_attn.everywhere.target import LeftAlone, Place, Target
from flax_attn.everywhere.words import asked_for
from flax_attn.functional.dropout import KeyedDropout
from flax_attn.functional.masks import Mask
from flax_attn.functional.outputs import Outputs

_MULTI_HEAD = "keras.src.layers.attention.multi_head_attention"
_GROUPED_QUERY = "keras.src.layers.attention.grouped_query_attention"
_FUNCTIONS = "keras.src.backend.jax.nn"
# What a layer makes of its own parts, if nobody has put others there.
_PARTS = {
    "_softmax": "keras.src.layers.activations.softmax.Softmax",
    "_dropout_layer": "keras.src.layers.regularization.dropout.Dropout",
}
_Result = tuple[Array, Array | None]


@dataclass(frozen=True)
class _Request:
    """What a layer asks for beside its heads."""

    mask: Array | None
    causal: bool
    scale: float
    rate: float
    training: bool | None
    scores: bool

    @property
    def explicit(self) -> bool:
        """Whether the layer computes scores itself; it calls the function elsewhere.

        A query that may see no key then has an output of 0, and elsewhere the mean of all values.
        """
        return self.scores or self.rate > 0


def multi_head_attention(
    original: Callable,
    layer: Any,
    query: Array,
    key: Array,
    value: Array,
    attention_mask: Array | None = None,
    training: bool | None = None,
    return_attention_scores: bool = False,
    use_causal_mask: bool = False,
) -> _Result:
    """Return what `MultiHeadAttention._compute_attention` returns."""
    request = _Request(
        attention_mask,
        use_causal_mask,
        layer._inverse_sqrt_key_dim,
        layer._dropout,
        training,
        return_attention_scores,
    )
    kind = import_module(_MULTI_HEAD).MultiHeadAttention
    return _attend_in_layer(layer, kind, (query, key, value), request)


def grouped_query_attention(
    original: Callable,
    layer: Any,
    query: Array,
    key: Array,
    value: Array,
    attention_mask: Array | None = None,
    training: bool | None = None,
    use_causal_mask: bool = False,
) -> _Result:
    """Return what `GroupedQueryAttention._compute_attention` returns."""
    request = _Request(
        attention_mask,
        use_causal_mask,
        layer._inverse_sqrt_head_dim,
        layer.dropout,
        training,
        layer._return_attention_scores,
    )
    kind = import_module(_GROUPED_QUERY).GroupedQueryAttention
    if type(layer).call is kind.call:
        # Which has repeated each of these heads for all that share it.
        key = key[:, :, :: layer.num_repeats]
        value = value[:, :, :: layer.num_repeats]
    return _attend_in_layer(layer, kind, (query, key, value), request)


def _attend_in_layer(
    layer: Any, kind: type, heads: tuple[Array, ...], request: _Request
) -> _Result:
    _check_layer(layer, kind)
    check_floats(*heads)
    query, key, value = promoted(*heads)
    if query.ndim != 4:
        raise LeftAlone(f"it attends along {query.ndim - 3} axes")
    if layer._flash_attention and request.scores:
        raise LeftAlone("flash attention returns no scores")
    training = _training(request.training)
    if training and request.rate > 0 and request.scores:
        raise LeftAlone("it returns scores from before dropout")
    mask = Mask.causal(0) if request.causal else Mask()
    if request.mask is not None:
        mask = mask & _four_axes(request.mask, request.explicit)
    # Last of all refusals: it takes a key out of the layer's stream.
    dropout = _keyed(layer._dropout_layer, request.rate) if training else None
    asked = asked_for(
        query,
        key,
        causal=request.causal,
        mask=request.mask,
        dropout=dropout,
        weights=request.scores,
    )
    found = attend(
        query,
        key,
        value,
        mask=mask,
        asked=asked,
        return_weights=request.scores,
        scale=request.scale,
        dropout=dropout,
    )
    if request.explicit:
        found = _zero_where_empty(found, mask, query, key)
    return found.output, found.weights


def _zero_where_empty(found: Outputs, mask: Mask, query: Array, key: Array) -> Outputs:
    b, t, n, _ = query.shape
    empty = empty_rows(mask, b, n, t, key.shape[1])
    return found if empty is None else fill_rows(found, empty, 0, 0.0)


def _check_layer(layer: Any, kind: Any) -> None:
    """Raise `LeftAlone` if a layer computes with parts that others have put in."""
    keras = import_module("keras")
    if keras.backend.backend() != "jax":
        raise LeftAlone("Keras does not compute with JAX")
    if type(layer)._masked_softmax is not kind._masked_softmax:
        raise LeftAlone("it overrides _masked_softmax")
    for attribute, expected in _PARTS.items():
        part = getattr(layer, attribute)
        found = class_name(part)
        if found != expected:
            raise LeftAlone(f"its {attribute} is a {found}")


def _training(training: bool | None) -> bool:
    """Return whether a layer trains: as it is told, or else as the layers around it are."""
    if training is None:
        # Keras passes an argument of a model on to the layers inside by this context.
        state = import_module("keras.src.backend.common.global_state")
        context = state.get_global_attribute("current_call_ctx")
        training = context is not None and context.get_value("training")
    return bool(training)


def _keyed(dropout: Any, rate: float) -> KeyedDropout | None:
    """Return the dropout of a layer with the next key of the layer's own stream."""
    if rate == 0:
        return None
    if dropout.noise_shape is not None:
        raise LeftAlone("it drops the same elements along an axis")
    if rate == 1:
        raise LeftAlone("it drops all weights")
    draw = import_module("keras.src.backend.jax.random").jax_draw_seed
    return KeyedDropout(rate, draw(dropout.seed_generator))


def _four_axes(mask: Array, explicit: bool) -> Array:
    """Return a mask `(..., t, s)` as a boolean one of rank 4; the axis of heads is the one before.

    A layer that computes scores itself sees where a number is above 0.5, the function where it is
    not 0.
    """
    mask = jnp.asarray(mask)
    if explicit and mask.dtype != bool:
        # In the dtype of the mask, in which 0.5 is 0 for whole numbers.
        mask = mask > jnp.asarray(0.5, mask.dtype)
    mask = mask.astype(bool)
    while mask.ndim < 4:
        mask = jnp.expand_dims(mask, -3)
    return mask


def dot_product_attention(
    original: Callable,
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
) -> Array:
    """Return what `keras.ops.dot_product_attention` returns."""
    if attn_logits_soft_cap is not None:
        raise LeftAlone("attn_logits_soft_cap= means one formula in the docs and one in the kernel")
    # Lists, and variables of Keras, become arrays as they would inside the original.
    convert = import_module("keras.src.backend.jax.core").convert_to_tensor
    query, key, value = (convert(x) for x in (query, key, value))
    check_floats(query, key, value)
    for name, array in {"bias": bias, "mask": mask}.items():
        axes = 4 if array is None else jnp.ndim(array)
        if axes != 4:
            raise LeftAlone(f"its {name} has {axes} axes, whose order is not said")
    if not query.ndim == key.ndim == value.ndim == 4:
        raise LeftAlone("query, key and value must have 4 axes")
    query, key, value = promoted(query, key, value)
    seen = Mask.causal(0) if is_causal else Mask()
    if mask is not None:
        seen = seen & jnp.asarray(mask).astype(bool)
    if bias is not None:
        bias = convert(bias, dtype=query.dtype)
    asked = asked_for(query, key, causal=is_causal, mask=mask, bias=bias)
    outputs = attend(query, key, value, bias, seen, scale=scale, asked=asked)
    return outputs.output


TARGET = Target(
    name="keras",
    package="keras",
    versions=">=3.10,<3.16",
    places=(
        Place(
            _MULTI_HEAD,
            "MultiHeadAttention._compute_attention",
            multi_head_attention,
            "keras.layers",
        ),
        Place(
            _GROUPED_QUERY,
            "GroupedQueryAttention._compute_attention",
            grouped_query_attention,
            "keras.layers",
        ),
        Place(_FUNCTIONS, "dot_product_attention", dot_product_attention, "keras.ops"),
    ),
)
