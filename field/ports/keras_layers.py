"""Layers of Keras on its JAX backend beside the same layers on its PyTorch backend."""

from __future__ import annotations

from functools import partial

from field.keras_backends import layers
from field.port import CHECKS, Built, Port
from flax_attn.convert import Layout, Rule

X, Y = (3, 7, 12), (3, 5, 12)
LAYER = "the same layer on Keras's PyTorch backend"


def ports() -> list[Port]:
    """Return the ports of Keras."""
    attention, grouped = "MultiHeadAttention", "GroupQueryAttention"
    # With biases in float32, the gradient of the key's bias is rounding alone.
    plain = {"use_bias": False}
    rows = {
        f"{attention}/self": ("no biases, padding", partial(_multi_head, plain)),
        f"{attention}/scores": (
            "padding, weights returned",
            partial(_multi_head, {}, return_attention_scores=True),
        ),
        f"{attention}/causal": (
            "no biases, use_causal_mask",
            partial(_multi_head, plain, use_causal_mask=True),
        ),
        f"{grouped}/default": (
            "four query heads, two key/value heads, no biases, padding",
            _grouped,
        ),
        "Attention/scale": ("use_scale, padding", partial(_single, "Attention", use_scale=True)),
        "Attention/concat": (
            "score_mode=concat, padding",
            partial(_single, "Attention", score_mode="concat"),
        ),
        "AdditiveAttention/default": ("padding", partial(_single, "AdditiveAttention")),
        "LayerNormalization/default": ("default arguments", partial(_plain, "LayerNormalization")),
        "RMSNormalization/default": ("default arguments", partial(_plain, "RMSNormalization")),
        "GroupNormalization/groups": (
            "three groups",
            partial(_plain, "GroupNormalization", groups=3),
        ),
        "EinsumDense/default": (
            "abc,cd->abd",
            partial(_plain, "EinsumDense", "abc,cd->abd", output_shape=(None, 5)),
        ),
    }
    return [
        Port(f"keras/{name}", "keras", text, build, LAYER, CHECKS)
        for name, (text, build) in rows.items()
    ]


def _built(made, inputs, call):
    jax_layer, torch_layer = made
    rules = tuple(Rule((name,), f"values.{name}") for name in jax_layer.args[0])
    layouts = [Layout(rules)] if rules else [None]
    return Built(jax_layer, torch_layer.eval(), inputs, layouts, flax_call=call, torch_call=call)


def _multi_head(options, dtype, **called):
    def call(layer, x, mask=None):
        return layer(x, x, key_mask=mask, value_mask=mask, **called)

    def make(keras):
        return keras.layers.MultiHeadAttention(3, 4, dtype=dtype, **options)

    return _built(layers(make, lambda layer: layer.build(X, X)), [X], call)


def _grouped(dtype):
    def call(layer, x, mask=None):
        return layer(x, x, key_mask=mask, value_mask=mask)

    def make(keras):
        return keras.layers.GroupQueryAttention(3, 4, 2, use_bias=False, dtype=dtype)

    return _built(layers(make, lambda layer: layer.build(X, X)), [X], call)


def _single(name, dtype, **options):
    def call(layer, query, value, mask=None):
        return layer([query, value], mask=None if mask is None else [None, mask])

    def make(keras):
        return getattr(keras.layers, name)(dtype=dtype, **options)

    return _built(layers(make, lambda layer: layer.build([X, X])), [X, X], call)


def _plain(name, *arguments, dtype=None, **options):
    *arguments, dtype = arguments if dtype is None else (*arguments, dtype)

    def make(keras):
        return getattr(keras.layers, name)(*arguments, dtype=dtype, **options)

    return _built(layers(make, lambda layer: layer.build(X)), [X], lambda layer, x: layer(x))
