"""Running a card: its example in JAX, its twin in PyTorch, both in float64."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

import flax_attn
from cards.card import Card
from flax_attn.parity import tolerance
from flax_attn.proof.build import drawn

TOKENS, WIDTH, HEAD = 10, 8, 4


class Outcome(NamedTuple):
    """What a card came to: the numbers to draw, and the error against PyTorch."""

    picture: np.ndarray
    error: float


def run(card: Card) -> Outcome:
    """Return the picture of a card and the relative error of its output against its twin.

    Raises:
        ValueError: if the two are not equal by the rule of the proof.
    """
    with jax.enable_x64(True), in_float64():
        names, picture = executed(card)
        with torch.no_grad():
            reference = np.asarray(card.twin(names))
    error = tolerance.relative({"output": np.asarray(names["output"])}, {"output": reference})[
        "output"
    ]
    if not error <= tolerance.FORWARD:
        raise ValueError(
            f"{card.name}: the output must be within {tolerance.FORWARD} of {card.equals}; got"
            f" {error}. Correct the example or its twin"
        )
    return Outcome(np.asarray(picture, np.float64), error)


def executed(card: Card) -> tuple[dict[str, Any], jax.Array]:
    """Run an example; return its names, limited to arrays and given values, and its picture.

    What is assigned to `layer` has parameters from a normal distribution, in float64: as
    constructed, biases are small and norm scales are 1, so that a wrong one would hardly show. All
    other statements are one function, compiled unless the card says otherwise.
    """
    names, rest = given(), []
    for statement in ast.parse(card.example).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "layer":
            names["layer"] = in_double(drawn(partial(made, ast.unparse(statement.value), names)))
        else:
            rest.append(ast.unparse(statement))

    def called(arrays: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
        inner = {**names, **arrays}
        exec("\n".join(rest), inner)
        drawing = jnp.asarray(eval(card.picture, inner))
        return _arrays(inner), drawing

    found, drawing = (called if card.eager else jax.jit(called))(_arrays(names))
    return {**names, **found}, drawing


def _arrays(names: dict[str, Any]) -> dict[str, jax.Array]:
    return {name: value for name, value in names.items() if isinstance(value, jax.Array)}


def made(constructor: str, names: dict[str, Any]) -> nnx.Module:
    """Return the layer of an expression, with random streams of its own."""
    return eval(constructor, {**names, "rngs": nnx.Rngs(0)})


def given() -> dict[str, Any]:
    """Return the names that every example may use."""
    random = np.random.default_rng(0)
    public = {name: getattr(flax_attn, name) for name in flax_attn.__all__}
    q, k, v = (jnp.asarray(random.normal(size=(TOKENS, 1, HEAD))) for _ in range(3))
    x = jnp.asarray(random.normal(size=(TOKENS, WIDTH)))
    query, key, value = (jnp.asarray(random.normal(size=(TOKENS, 4, 16))) for _ in range(3))
    own = {"q": q, "k": k, "v": v, "query": query, "key": key, "value": value, "x": x}
    own |= {"influence": influence, "held": held}
    return {"jnp": jnp, "np": np, "jax": jax, "nnx": nnx, **public, **own}


def in_double(layer: nnx.Module) -> nnx.Module:
    """Return a layer whose floating parameters are float64, and which is in eval mode."""
    wide = jax.tree.map(
        lambda leaf: leaf.astype(float) if leaf.dtype == jnp.float32 else leaf, nnx.state(layer)
    )
    nnx.update(layer, wide)
    layer.eval()
    return layer


def influence(function: Callable, x: jax.Array) -> jax.Array:
    """Return how much each output token changes when an input token is set to zero."""
    kept = 1 - jnp.eye(len(x), dtype=x.dtype)
    without = jax.vmap(lambda kept: function(x * kept.reshape(-1, *[1] * (x.ndim - 1))))(kept)
    changes = (without - function(x)).reshape(len(x), without.shape[1], -1)
    return jnp.sqrt((changes**2).sum(-1)).T


def held(cache: flax_attn.KVCache) -> jax.Array:
    """Return the position in each slot of a cache after each token, counted from 1."""

    def step(cache: flax_attn.KVCache, _: None) -> tuple[flax_attn.KVCache, jax.Array]:
        cache = cache.append(jnp.ones((1, 1, 1), jnp.float32), jnp.ones((1, 1, 1), jnp.float32))
        return cache, cache.key_positions + 1

    return jax.lax.scan(step, cache, None, TOKENS)[1]


@contextmanager
def in_float64() -> Iterator[None]:
    """Make transformers compute in float64 wherever it names float32.

    This covers norms, softmaxes, rotary angles and states.
    """
    default = torch.get_default_dtype()
    doubles = {"float": torch.float64, "float32": torch.float64, "FloatTensor": torch.DoubleTensor}
    with ExitStack() as stack:
        for name, value in doubles.items():
            stack.enter_context(mock.patch.object(torch, name, value))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        torch.set_default_dtype(torch.float64)
        stack.callback(torch.set_default_dtype, default)
        yield
