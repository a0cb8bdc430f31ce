"""A model as small programs, of which one serves all layers of a kind: twelve equal layers are compiled as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from flax_attn.models.language_model import LanguageModel
from flax_attn.models.sampling import Sampling, sample
from flax_attn.models.stack import Stack
from flax_attn.sharding.parameters import unname_first_axis


class _Part(NamedTuple):
    """A module taken apart: how it is built, and its arrays."""

    graph: Any
    state: Any


def new_tokens(
    model: LanguageModel,
    tokens: np.ndarray,
    lengths: np.ndarray,
    capacity: int,
    sampling: Sampling,
    key: Array | np.ndarray,
) -> Iterator[Array]:
    """Yield the tokens `(b,)` that follow prompts, without an end.

    Args:
        model: in eval mode.
        tokens: prompts `(b, t)`, padded.
        lengths: how many tokens of each prompt are real, `(b,)`.
        capacity: of the caches of layers without a window.
        sampling: how a token is drawn.
        key: what is drawn, two uint32.
    """
    ends, layers = _take_apart(model)
    choose = _choose(ends.graph, sampling)
    steps = [_step(layer.graph) for layer in layers]
    x, caches = _embed(ends.graph)(ends.state, tokens, lengths), []
    for layer in layers:
        x, cache = _prefill(layer.graph, capacity)(layer.state, x, lengths)
        caches.append(cache)
    x = _last(x, lengths)
    for made in count():
        token, x = choose(ends.state, x, lengths, np.int32(made), key)
        yield token
        for i, (step, layer) in enumerate(zip(steps, layers, strict=True)):
            x, caches[i] = step(layer.state, x, caches[i])


def _take_apart(model: LanguageModel) -> tuple[_Part, list[_Part]]:
    """Return what comes before and after the layers, and the layers."""
    ends = nnx.merge(*nnx.split(model))  # shares its arrays
    ends.trf_blocks = nnx.List([])
    blocks = model.trf_blocks
    if not isinstance(blocks, Stack):
        return _Part(*nnx.split(ends)), [_Part(*nnx.split(block)) for block in blocks]
    graph, state = nnx.split(blocks.block)
    return _Part(*nnx.split(ends)), [_unstacked(graph, _layer(state, np.int32(i))) for i in range(len(blocks))]


def _unstacked(graph: Any, state: Any) -> _Part:
    """Return one layer of a stack as a block of its own is: so that both run the same programs."""
    block = nnx.merge(graph, state)
    for _, variable in nnx.iter_graph(block):
        if isinstance(variable, nnx.Variable):
            unname_first_axis(variable)
    return _Part(*nnx.split(block))


@jax.jit
def _layer(state: Any, i: Any) -> Any:
    return jax.tree.map(lambda x: x[i], state)


@jax.jit
def _last(x: Array, lengths: Array) -> Array:
    return jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)


# The graph of a module is slow to compare: so each has a function of its own, instead of being an argument.
@lru_cache
def _embed(graph: Any) -> Callable:
    @jax.jit
    def embed(state, tokens, lengths):
        order = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=lengths.dtype), tokens.shape)
        positions = jnp.where(order < lengths[:, None], order, 0)  # of padding they could lie beyond the table
        return nnx.merge(graph, state).embed(tokens, positions, None)

    return embed


@lru_cache
def _prefill(graph: Any, capacity: int) -> Callable:
    @jax.jit
    def prefill(state, x, lengths):
        block = nnx.merge(graph, state)
        cache = block.init_cache(len(x), block.att.window or capacity)
        # A static length of 0 says that the cache is empty, so that the prompt attends to itself alone.
        return block(x, lengths=lengths, cache=replace(cache, length=0))

    return prefill


@lru_cache
def _step(graph: Any) -> Callable:
    def step(state, x, cache):
        return nnx.merge(graph, state)(x, cache=cache)

    return jax.jit(step, donate_argnums=(1, 2))


@lru_cache
def _choose(graph: Any, sampling: Sampling) -> Callable:
    @jax.jit
    def choose(state, x, lengths, made, key):
        model = nnx.merge(graph, state)
        token = sample(model.logits(model.final_norm(x)[:, 0]), sampling, key, made)
        return token, model.embed(token[:, None], (lengths + made)[:, None], None)

    return choose
