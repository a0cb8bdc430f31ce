"""Stacks of blocks of GPT-2's size: a norm and attention, a norm and two products, each added."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

os.environ.setdefault("KERAS_BACKEND", "jax")

# The sizes of GPT-2 small.
WIDTH, HEADS = 768, 12
HIDDEN = 4 * WIDTH
# A function of weights and inputs `(b, t, d)`, and its weights.
Model = tuple[Callable, Any]


def of_nnx(layers: int, x: jax.Array) -> Model:
    """Return blocks of `nnx.MultiHeadAttention`."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.attention_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
            self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            mask = nnx.make_causal_mask(x[..., 0])
            x = x + self.attention(self.attention_norm(x), mask=mask)
            hidden = self.up(self.norm(x))
            return x + self.down(jax.nn.gelu(hidden))

    blocks = [Block(nnx.Rngs(i)) for i in range(layers)]
    graph, weights = nnx.split(nnx.Sequential(*blocks))

    def forward(weights: Any, x: jax.Array) -> jax.Array:
        model = nnx.merge(graph, weights)
        return model(x)

    return forward, weights


def of_linen(layers: int, x: jax.Array) -> Model:
    """Return blocks of `linen.MultiHeadDotProductAttention`."""
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            mask = nn.make_causal_mask(x[..., 0])
            normed = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(HEADS)(normed, mask=mask)
            normed = nn.LayerNorm()(x)
            hidden = nn.Dense(HIDDEN)(normed)
            return x + nn.Dense(WIDTH)(jax.nn.gelu(hidden))

    model = nn.Sequential([Block() for _ in range(layers)])
    # Weights have no axis of tokens: a few of them are enough to make these.
    return model.apply, model.init(jax.random.key(0), x[:, :8])


def of_keras(layers: int, x: jax.Array) -> Model:
    """Return blocks of `keras.layers.MultiHeadAttention`."""
    import keras  # pyright: ignore[reportMissingImports] (not among the developers' packages)

    inputs = keras.Input((None, WIDTH))
    y = inputs
    for _ in range(layers):
        normed = keras.layers.LayerNormalization()(y)
        attention = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
        y = y + attention(normed, normed, use_causal_mask=True)
        hidden = keras.layers.LayerNormalization()(y)
        hidden = keras.layers.Dense(HIDDEN, activation="gelu")(hidden)
        y = y + keras.layers.Dense(WIDTH)(hidden)
    model = keras.Model(inputs, y)
    state = [variable.value for variable in model.non_trainable_variables]
    weights = [variable.value for variable in model.trainable_variables]

    def forward(weights: Any, x: jax.Array) -> jax.Array:
        output, *_ = model.stateless_call(weights, state, x)
        return output

    return forward, weights


def of_equinox(layers: int, x: jax.Array) -> Model:
    """Return blocks of `equinox.nn.MultiheadAttention`."""
    import equinox as eqx

    class Block(eqx.Module):
        attention_norm: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention
        norm: eqx.nn.LayerNorm
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, key: jax.Array):
            attention, up, down = jax.random.split(key, 3)
            self.attention_norm = eqx.nn.LayerNorm(WIDTH)
            self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=attention)
            self.norm = eqx.nn.LayerNorm(WIDTH)
            self.up = eqx.nn.Linear(WIDTH, HIDDEN, key=up)
            self.down = eqx.nn.Linear(HIDDEN, WIDTH, key=down)

        def __call__(self, x: jax.Array) -> jax.Array:
            # Its layers take one token each, and attention those of one row.
            mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
            normed = jax.vmap(self.attention_norm)(x)
            x = x + self.attention(normed, normed, normed, mask)
            normed = jax.vmap(self.norm)(x)
            hidden = jax.vmap(self.up)(normed)
            return x + jax.vmap(self.down)(jax.nn.gelu(hidden))

    blocks = [Block(jax.random.key(i)) for i in range(layers)]
    weights, rest = eqx.partition(blocks, eqx.is_inexact_array)

    def forward(weights: Any, x: jax.Array) -> jax.Array:
        for block in eqx.combine(weights, rest):
            x = jax.vmap(block)(x)
        return x

    return forward, weights


MODELS = {"nnx": of_nnx, "linen": of_linen, "keras": of_keras, "equinox": of_equinox}
