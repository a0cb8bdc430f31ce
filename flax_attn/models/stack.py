"""Stacked blocks of a model, run by one scan.

Only in flax_attn: it saves compiling.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype
from jaxtyping import Array

from attn_spec.cache_checks import check_cache_shapes, check_caches, check_stacked_cache
from flax_attn.convert.stacked import places
from flax_attn.functional.cache import KVCache
from flax_attn.functional.cache_base import Cache
from flax_attn.functional.outputs import Outputs
from flax_attn.functional.shapes import ArrayLike, Tokens
from flax_attn.models.blocks import block_options, empty_cache, pure
from flax_attn.models.layer_pattern import (
    Block,
    change_variables,
    give_numbers,
    group_by_pattern,
    kind_of,
    stack_modules,
    take_numbers,
)
from flax_attn.modules.cross_block import CrossBlock
from flax_attn.modules.work import Work, work
from flax_attn.sharding.parameters import unname_first_axis


class Stack(nnx.Module):
    """Blocks of equal shape with stacked parameters, run by one scan and compiled once.

    Blocks may take turns, such as local and full attention: then a scan runs one turn after
    another, and each block of a turn is compiled once. Blocks that come before the first turn are
    compiled by themselves.

    Args:
        blocks: blocks of equal shapes, dtypes and options, or turns of such blocks; their dropout
            is the same as without the stack.

    Attributes:
        block: the stacked block; where blocks take turns, a list of those before the first turn and
            those of a turn.
        stacked_layers: the numbers of the layers of each of them.

    Raises:
        ValueError: if there is no block.
        UnequalLayersError: if two differ that do not take turns.

    Example:
        >>> from flax_attn import GPT2, GPT2Config
        >>> config = GPT2Config(6, 2, num_layers=3, context_length=8, vocab_size=11)
        >>> model = GPT2(config, scan_layers=True, rngs=nnx.Rngs(0))
        >>> model.trf_blocks.block.norm1.scale.shape
        (3, 6)
    """

    def __init__(self, blocks: Sequence[Block]):
        if not blocks:
            raise ValueError(
                "scan_layers=True stacks one layer at least; got num_layers=0. Pass"
                " scan_layers=False"
            )
        # Blocks that differ in these numbers alone can be stacked.
        own = [take_numbers(block) for block in blocks]
        kinds = [kind_of(block) for block in blocks]
        # `flax_attn.convert` names layers by it.
        self.stacked_layers = group_by_pattern(kinds)
        stacked = []
        for layers in self.stacked_layers:
            members = [blocks[i] for i in layers]
            stacked.append(stack_modules(members))
        self.block: Any = stacked[0] if len(stacked) == 1 else nnx.List(stacked)
        # Tuples, as they are part of the graph that compiled functions are kept by.
        self.numbers = tuple(tuple(own[i] for i in layers) for layers in self.stacked_layers)

    def __len__(self) -> int:
        return sum(map(len, self.stacked_layers))

    @property
    def blocks(self) -> list[Block]:
        """The stacked blocks."""
        return [self.block] if len(self.stacked_layers) == 1 else list(self.block)

    @property
    def layers(self) -> list[tuple[int, int]]:
        """Of each layer, in order: which stacked block it is part of, and where there."""
        return places(self.stacked_layers)

    @property
    def of_layers(self) -> list[Block]:
        """The stacked block that each layer is part of."""
        return [self.blocks[m] for m, _ in self.layers]

    def unstacked(self) -> list[Block]:
        """Return a block for each layer, with the parameters of that layer."""
        states = [nnx.state(block) for block in self.blocks]
        return [self._unstack(m, i, _layer(states[m], np.int32(i))) for m, i in self.layers]

    def _unstack(self, m: int, i: int, state: Any) -> Block:
        block = nnx.merge(nnx.graphdef(self.blocks[m]), state)
        change_variables(block, unname_first_axis)
        return give_numbers(block, self.numbers[m][i])

    def init_cache(
        self, b: int | None, capacity: int, dtype: Dtype | None = None
    ) -> tuple[Cache, ...]:
        """Return an empty cache for each stacked block; the first axis is that of its layers."""
        empty = [empty_cache(block, b, capacity, dtype) for block in self.blocks]
        pairs = zip(empty, self.stacked_layers, strict=True)
        return tuple(_with_layers(cache, len(layers)) for cache, layers in pairs)

    def positions(
        self, cache: tuple[Cache, ...], shape: tuple[int, ...], lengths: ArrayLike | int | None
    ) -> Array:
        """Return the positions of the next tokens, of shape `(*b, t)`, see `Cache.positions`.

        Raises:
            ValueError: unless there is a cache for each stacked block, as many layers long as it
                has, made for these rows.
        """
        check_caches("cache", cache, len(self.stacked_layers))
        for one, layers in zip(cache, self.stacked_layers, strict=True):
            check_stacked_cache({name: x.shape for name, x in one.arrays.items()}, len(layers))
        *batch, t = shape
        first = _changed(lambda x: x[0], cache[0])
        check_cache_shapes({"rows": first.batch}, {"rows": tuple(batch)})
        return first.positions(t, lengths)

    def keep(self, encoded: Tokens, lengths: ArrayLike | int | None) -> tuple[KVCache, ...]:
        """Return the keys and values of an encoder's output, for each stacked cross block."""

        def keep(block: Block) -> KVCache:
            graph, state = nnx.split(cast(CrossBlock, block).cross)
            # The layers one after another, each with its part of the state.
            return jax.lax.map(lambda own: nnx.merge(graph, own).keep(encoded, lengths), state)

        return tuple(map(keep, self.blocks))

    def run(
        self,
        x: Tokens,
        *,
        cache: tuple[Cache, ...] | None,
        key: Array | None,
        remat: bool,
        positions: ArrayLike | None,
        each: Sequence[dict[str, Any]] = (),
        **options: Any,
    ) -> Outputs[tuple[Cache, ...]]:
        """Return the tokens after all layers, and the caches if there are any.

        The arguments are those of `Blocks.run`; what is of one layer has the layers as its first
        axis.
        """
        # A scan returns tokens of the dtype that it is given.
        for block in self.blocks:
            x = x.astype(_output_dtype(block, x))
        options["positions"] = positions
        caches = []
        for members in self._runs():
            own = None if cache is None else [cache[m] for m in members]
            further = [each[m] for m in members] if each else []
            x, after = self._scan(members, x, own, key, remat, further, **options)
            caches += after or []
        return Outputs(x, cache=None if cache is None else tuple(caches))

    def _runs(self) -> list[list[int]]:
        """Return the stacked blocks that are scanned together: those of a turn."""
        counts = list(map(len, self.stacked_layers))
        # The layers before the first turn are scanned one by one, as stacks of one layer.
        alone = [[m] for m, count in enumerate(counts) if count == 1]
        turn = [m for m, count in enumerate(counts) if count > 1]
        return [*alone, turn] if turn else alone

    def _scan(
        self,
        members: Sequence[int],
        x: Tokens,
        caches: Sequence[Cache] | None,
        key: Array | None,
        remat: bool,
        each: Sequence[dict],
        positions: ArrayLike | None,
        **options: Any,
    ) -> tuple[Tokens, list[Cache] | None]:
        """Run the layers of these stacked blocks, one of each in turn."""
        blocks = [self.blocks[m] for m in members]
        split = [nnx.split(block) for block in blocks]
        graphs = [graph for graph, _ in split]

        def turn(carry, inputs):
            x, stored = carry
            i, layers, states, numbers, each = inputs
            stored = list(stored)
            kept = []
            for m, block in enumerate(blocks):
                further = each[m] if each else {}
                own = block_options(block, layers[m], key, positions, options | further)
                run = pure(graphs[m], own, numbers[m])
                if caches is None:
                    # The scan itself keeps XLA from merging both computations.
                    run = jax.checkpoint(run, prevent_cse=False) if remat else run
                    x, changed = run(states[m], x)
                    kept.append((changed, None))
                    continue
                mine = _read_layer(stored[m], i)
                ran, changed = run(states[m], x, caches[m].replace(**mine))
                x = ran.output
                stored[m] = _write_layer(stored[m], i, ran.cache.arrays)
                # Of the cache only the length is left to return, which may be static.
                length = _changed(lambda x: x[:0], ran.cache)
                kept.append((changed, length))
            return (x, stored), kept

        # The axis of the turns is the first one of all that is scanned over.
        layers = jnp.asarray([self.stacked_layers[m] for m in members]).T
        states = [state for _, state in split]
        numbers = [_columns(self.numbers[m]) for m in members]
        inputs = jnp.arange(len(layers)), layers, states, numbers, list(each)
        arrays = [] if caches is None else [cache.arrays for cache in caches]
        (x, stored), kept = jax.lax.scan(turn, (x, arrays), inputs)
        for block, (changed, _) in zip(blocks, kept, strict=True):
            nnx.update(block, changed)
        if caches is None:
            return x, None
        found = []
        for (_, after), arrays in zip(kept, stored, strict=True):
            length = _of_first_layer(after.length)
            found.append(after.replace(**arrays, length=length))
        return x, found

    def work(self, t: int, s: int) -> Work:
        """Return the operations of all layers for `t` queries and `s` keys."""
        found = Work()
        for block, layers in zip(self.blocks, self.stacked_layers, strict=True):
            one = work(block, t, s)
            # The kernels are those of all layers already, the heads those of one.
            found += Work(one.parameters, len(layers) * one.attention)
        return found


@jax.jit
def _layer(state: Any, i: Any) -> Any:
    return jax.tree.map(lambda x: x[i], state)


def _columns(numbers: Sequence[tuple[float, ...]]) -> tuple[Array, ...]:
    """Return each of the numbers that layers have of their own as an array over these layers."""
    columns = zip(*numbers, strict=True)
    return tuple(map(jnp.asarray, columns))


def _read_layer(arrays: dict[str, Array], i: Array) -> dict[str, Array]:
    index = partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False)
    return {name: index(array) for name, array in arrays.items()}


def _write_layer(arrays: dict[str, Array], i: Array, new: dict[str, Array]) -> dict[str, Array]:
    # Carried and written in place, the caches are in memory once.
    write = partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
    return {name: write(arrays[name], array) for name, array in new.items()}


def _output_dtype(block: Block, x: Tokens) -> Dtype:
    if block.att.dtype is not None:
        return block.att.dtype
    params = jax.tree.leaves(nnx.state(block, nnx.Param))
    return jnp.result_type(x, *params)


def _changed(change: Callable[[Array], Array], cache: Cache) -> Cache:
    """Return a cache with what it stores changed."""
    return cache.replace(**{name: change(array) for name, array in cache.arrays.items()})


def _with_layers(cache: Cache, count: int) -> Cache:
    return _changed(lambda x: jnp.broadcast_to(x, (count, *x.shape)), cache)


def _of_first_layer(length: Any) -> Any:
    # All layers have stored the same tokens; a static length was never stacked.
    return length if isinstance(length, int) else length[0]
