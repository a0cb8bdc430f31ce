"""Stacks of blocks of GPT-2's size: a norm and attention, a norm and two products, each added."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

os.environ.setdefault("KERAS_BACKEND", "jax")

WIDTH, HEADS = 768, 12
# A function of weights and inputs `(b, t, d)`, and its weights.
Model = tuple[Callable, Any]


def of_nnx(layers: int, x: jax.Array) -> Model:
    """Return blocks of `nnx.MultiHeadAttention`."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
            self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            mask = nnx.make_causal_mask(x[..., 0])
            x = x + self.attention(self.norms[0](x), mask=mask)
            return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))

    graph, weights = nnx.split(nnx.Sequential(*(Block(nnx.Rngs(i)) for i in range(layers))))
    return lambda weights, x: nnx.merge(graph, weights)(x), weights


def of_linen(layers: int, x: jax.Array) -> Model:
    """Return blocks of `linen.MultiHeadDotProductAttention`."""
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            mask = nn.make_causal_mask(x[..., 0])
            attention = nn.MultiHeadDotProductAttention(HEADS)
            x = x + attention(nn.LayerNorm()(x), mask=mask)
            hidden = jax.nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
            return x + nn.Dense(WIDTH)(hidden)

    model = nn.Sequential([Block() for _ in range(layers)])
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
        hidden = keras.layers.Dense(4 * WIDTH, activation="gelu")(hidden)
        y = y + keras.layers.Dense(WIDTH)(hidden)
    model = keras.Model(inputs, y)
    state = [variable.value for variable in model.non_trainable_variables]
    weights = [variable.value for variable in model.trainable_variables]
    return lambda weights, x: model.stateless_call(weights, state, x)[0], weights


def of_equinox(layers: int, x: jax.Array) -> Model:
    """Return blocks of `equinox.nn.MultiheadAttention`."""
    import equinox as eqx

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, key: jax.Array):
            keys = jax.random.split(key, 3)
            self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
            self.norms = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
            self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=keys[1])
            self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=keys[2])

        def __call__(self, x: jax.Array) -> jax.Array:
            mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
            normed = jax.vmap(self.norms[0])(x)
            x = x + self.attention(normed, normed, normed, mask)
            hidden = jax.vmap(self.up)(jax.vmap(self.norms[1])(x))
            return x + jax.vmap(self.down)(jax.nn.gelu(hidden))

    blocks = [Block(jax.random.key(i)) for i in range(layers)]
    weights, rest = eqx.partition(blocks, eqx.is_inexact_array)

    def forward(weights: Any, x: jax.Array) -> jax.Array:
        for block in eqx.combine(weights, rest):
            x = jax.vmap(block)(x)
        return x

    return forward, weights


MODELS = {"nnx": of_nnx, "linen": of_linen, "keras": of_keras, "equinox": of_equinox}
