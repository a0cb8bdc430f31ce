"""Running the blocks of a model: one after another, or one scan over blocks whose parameters are stacked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jaxtyping import Array

from flax_attn.functional.cache import KVCache
from flax_attn.functional.dropout import fold_in
from flax_attn.functional.shapes import ArrayLike, Tokens
from flax_attn.modules.block import TransformerBlock
from flax_attn.sharding.parameters import name_first_axis

M = TypeVar("M")


class Stack(nnx.Module):
    """Blocks of equal shape as one: their parameters stacked along a first axis, run by one scan, compiled once.

    Args:
        blocks: of equal shapes, dtypes and options; they draw what they drop as they would alone.

    Raises:
        ValueError: if there is no block, or two differ.

    Example:
        >>> from flax_attn import GPT2, GPT2Config
        >>> config = GPT2Config(6, 2, num_layers=3, context_length=8, vocab_size=11)
        >>> model = GPT2(config, scan_layers=True, rngs=nnx.Rngs(0))
        >>> model.trf_blocks.block.norm1.scale.shape
        (3, 6)
    """

    def __init__(self, blocks: Sequence[TransformerBlock]):
        if not blocks:
            raise ValueError("scan_layers=True stacks one layer at least; got num_layers=0. Pass scan_layers=False")
        split = [nnx.split(block) for block in blocks]
        kinds = [(graph, jax.tree.map(lambda x: (x.shape, x.dtype), state)) for graph, state in split]
        for i, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise ValueError(
                    f"scan_layers=True stacks layers of equal shapes and options; layer {i} differs from layer 0, in a "
                    "window, a width or a dtype. Pass scan_layers=False"
                )
        self.stacked_layers = len(blocks)  # flax_attn.convert knows by it that `block` is stacked
        self.block: TransformerBlock = stack_modules(blocks)

    def __len__(self) -> int:
        return self.stacked_layers

    def init_cache(self, b: int | None, capacity: int, dtype: Dtype | None = None) -> KVCache:
        """Return the empty cache of all layers: keys and values with the layers as a first axis."""
        cache = self.block.init_cache(b, capacity, dtype)
        keys, values = (jnp.zeros((len(self), *x.shape), x.dtype) for x in (cache.key, cache.value))
        return replace(cache, key=keys, value=values)

    def run(
        self, x: Tokens, cache: KVCache | None, key: Array | None, remat: bool, **options: Any
    ) -> tuple[Tokens, KVCache | None]:
        """Return the tokens after all layers, and the cache after them."""
        graph, state = nnx.split(self.block)
        x = x.astype(self._output_dtype(x))

        def layer(carry, inputs):
            x, cached = carry
            i, state = inputs
            block = pure(graph, {**options, "dropout_key": fold_in(key, 1 + i)})
            if cache is None:
                x, changed = (jax.checkpoint(block, prevent_cse=False) if remat else block)(state, x)
                return (x, cached), (changed, None)
            own = [jax.lax.dynamic_index_in_dim(array, i, keepdims=False) for array in cached]
            (x, after), changed = block(state, x, cache=replace(cache, key=own[0], value=own[1]))
            # Carried and written in place, the caches are in memory once.
            cached = [
                jax.lax.dynamic_update_index_in_dim(array, new, i, 0)
                for array, new in zip(cached, (after.key, after.value), strict=True)
            ]
            # Of the cache only the length is left to return, which may be static.
            return (x, cached), (changed, replace(after, key=after.key[..., :0, :], value=after.value[..., :0, :]))

        start = (x, None if cache is None else [cache.key, cache.value])
        (x, cached), (changed, after) = jax.lax.scan(layer, start, (jnp.arange(len(self)), state))
        nnx.update(self.block, changed)
        if cached is None:
            return x, None
        return x, replace(after, key=cached[0], value=cached[1], length=_of_first_layer(after.length))

    def _output_dtype(self, x: Tokens) -> Dtype:
        own = self.block.att.dtype
        return jnp.result_type(x, *jax.tree.leaves(nnx.state(self.block, nnx.Param))) if own is None else own


def stack_modules(modules: Sequence[M]) -> M:
    """Return modules of equal shape as one, whose variables have them as their first axis."""
    split = [nnx.split(module) for module in modules]
    stacked = nnx.merge(split[0][0], jax.tree.map(lambda *arrays: jnp.stack(arrays), *(state for _, state in split)))
    for _, variable in nnx.iter_graph(stacked):
        if isinstance(variable, nnx.Variable):
            name_first_axis(variable)
    return stacked


def run_blocks(
    blocks: Sequence[TransformerBlock] | Stack,
    x: Tokens,
    cache: tuple[KVCache, ...] | None,
    key: Array | None,
    remat: bool,
    positions: ArrayLike | None,
    **options: Any,
) -> tuple[Tokens, tuple[KVCache, ...] | None]:
    """Return the tokens after all blocks and the cache after them; `positions` are for blocks with `rope`."""
    if isinstance(blocks, Stack):
        options["positions"] = None if blocks.block.att.rope is None else positions
        x, after = blocks.run(x, None if cache is None else cache[0], key, remat, **options)
        return x, None if after is None else (after,)
    caches = []
    for i, block in enumerate(blocks):
        own = {
            **options,
            "positions": None if block.att.rope is None else positions,
            "dropout_key": fold_in(key, 1 + i),
        }
        if cache is not None:
            x, extended = block(x, cache=cache[i], **own)
            caches.append(extended)
        else:
            x = _recompute(block, x, own) if remat else block(x, **own)
    return x, None if cache is None else tuple(caches)


def pure(graph: Any, options: Any) -> Callable:
    """Return a block as a function of its state: it returns the output, and the counts of keys that it changed."""

    def run(state, x, **cache):
        copy = nnx.merge(graph, state)
        before = {path: count.get_value() for path, count in nnx.to_flat_state(nnx.state(copy, nnx.RngCount))}
        y = copy(x, **options, **cache)
        after = nnx.to_flat_state(nnx.state(copy, nnx.RngCount))
        # Only what the block changed: a model that was closed over cannot be written to.
        return y, nnx.from_flat_state([(path, c) for path, c in after if c.get_value() is not before[path]])

    return run


def _recompute(block: TransformerBlock, x: Tokens, options: dict[str, Any]) -> Tokens:
    """Return `block(x, **options)`; the backward pass computes its activations again instead of storing them."""
    graph, state = nnx.split(block)
    y, counts = jax.checkpoint(pure(graph, options))(state, x)
    nnx.update(block, counts)
    return y


def cached_positions(
    blocks: Sequence[TransformerBlock] | Stack, cache: tuple[KVCache, ...], t: int, lengths: ArrayLike | int | None
) -> Array:
    """Return the positions of the next `t` tokens, see `KVCache.positions`."""
    first = cache[0]
    first = replace(first, key=first.key[0], value=first.value[0]) if isinstance(blocks, Stack) else first
    return first.positions(t, lengths)


def _of_first_layer(length: Any) -> Any:
    return length if isinstance(length, int) else length[0]
