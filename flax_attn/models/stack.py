"""Running the blocks of a model, one after another or by a scan over stacked blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jaxtyping import Array

from attn_spec.cache_checks import check_caches, check_stacked_cache
from flax_attn.convert.stacked import places
from flax_attn.functional.cache_base import Cache
from flax_attn.functional.dropout import fold_in
from flax_attn.functional.shapes import ArrayLike, Tokens
from flax_attn.models.layer_pattern import (
    Block,
    give_numbers,
    in_turns,
    kind_of,
    stack_modules,
    take_numbers,
)
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
        numbers = [take_numbers(block) for block in blocks]
        self.stacked_layers = in_turns(
            [kind_of(block) for block in blocks]
        )  # flax_attn.convert names layers by it
        self.numbers = tuple(tuple(numbers[i] for i in layers) for layers in self.stacked_layers)
        stacked = [stack_modules([blocks[i] for i in layers]) for layers in self.stacked_layers]
        self.block: Any = stacked[0] if len(stacked) == 1 else nnx.List(stacked)

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

    def unstack(self, m: int, i: int, state: Any) -> Block:
        """Return the layer at `i` of the stacked block `m`, which has this `state`."""
        block = nnx.merge(nnx.graphdef(self.blocks[m]), state)
        for _, variable in nnx.iter_graph(block):
            if isinstance(variable, nnx.Variable):
                unname_first_axis(variable)
        return give_numbers(block, self.numbers[m][i])

    def init_cache(
        self, b: int | None, capacity: int, dtype: Dtype | None = None
    ) -> tuple[Cache, ...]:
        """Return an empty cache for each stacked block; the first axis is that of its layers."""
        caches = [_init_cache(block, b, capacity, dtype) for block in self.blocks]
        counts = map(len, self.stacked_layers)
        return tuple(
            _of_layers(lambda x, n=n: jnp.broadcast_to(x, (n, *x.shape)), c)
            for n, c in zip(counts, caches, strict=True)
        )

    def run(
        self,
        x: Tokens,
        cache: tuple[Cache, ...] | None,
        key: Array | None,
        remat: bool,
        each: Sequence[dict],
        **options: Any,
    ) -> tuple[Tokens, tuple[Cache, ...] | None]:
        """Return the tokens and caches after all layers; the arguments are as in `run_blocks`."""
        first = [m for m, layers in enumerate(self.stacked_layers) if len(layers) == 1]
        turn = [m for m in range(len(self.stacked_layers)) if m not in first]
        for block in self.blocks:
            x = x.astype(_output_dtype(block, x))
        caches = []
        for members in (*([m] for m in first), *([turn] if turn else [])):
            own = None if cache is None else [cache[m] for m in members]
            x, after = self._scan(
                members, x, own, key, remat, [each[m] for m in members] if each else [], **options
            )
            caches += after or []
        return x, None if cache is None else tuple(caches)

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
        layers = jnp.asarray([self.stacked_layers[m] for m in members]).T
        numbers = [tuple(map(jnp.asarray, zip(*self.numbers[m], strict=True))) for m in members]

        def turn(carry, inputs):
            x, stored = carry
            i, layers, states, numbers, each = inputs
            stored, kept = list(stored), []
            for m, (block, (graph, _)) in enumerate(zip(blocks, split, strict=True)):
                own = {
                    **options,
                    **(each[m] if each else {}),
                    "dropout_key": fold_in(key, 1 + layers[m]),
                }
                own["positions"] = None if block.att.rope is None else positions
                run = pure(graph, own, numbers[m])
                if caches is None:
                    x, changed = (jax.checkpoint(run, prevent_cse=False) if remat else run)(
                        states[m], x
                    )
                    kept.append((changed, None))
                    continue
                mine = jax.tree.map(
                    lambda array: jax.lax.dynamic_index_in_dim(array, i, keepdims=False), stored[m]
                )
                (x, after), changed = run(states[m], x, cache=caches[m].replace(**mine))
                # Carried and written in place, the caches are in memory once.
                stored[m] = {
                    name: jax.lax.dynamic_update_index_in_dim(stored[m][name], new, i, 0)
                    for name, new in after.arrays.items()
                }
                # Of the cache only the length is left to return, which may be static.
                kept.append((changed, _of_layers(lambda x: x[:0], after)))
            return (x, tuple(stored)), kept

        start = x, () if caches is None else tuple(cache.arrays for cache in caches)
        inputs = jnp.arange(len(layers)), layers, [state for _, state in split], numbers, list(each)
        (x, stored), kept = jax.lax.scan(turn, start, inputs)
        for block, (changed, _) in zip(blocks, kept, strict=True):
            nnx.update(block, changed)
        if caches is None:
            return x, None
        afters = [after for _, after in kept if after is not None]
        pairs = zip(afters, stored, strict=True)
        return x, [
            after.replace(**arrays, length=_of_first_layer(after.length)) for after, arrays in pairs
        ]

    def work(self, t: int, s: int) -> Work:
        """Return the operations of all layers for `t` queries and `s` keys."""
        found = Work()
        for block, layers in zip(self.blocks, self.stacked_layers, strict=True):
            one = work(block, t, s)
            # The kernels are those of all layers already, the heads those of one.
            found += Work(one.parameters, len(layers) * one.attention)
        return found


def _output_dtype(block: Block, x: Tokens) -> Dtype:
    own = block.att.dtype
    return jnp.result_type(x, *jax.tree.leaves(nnx.state(block, nnx.Param))) if own is None else own


def run_blocks(
    blocks: Sequence[Block] | Stack,
    x: Tokens,
    cache: tuple[Cache, ...] | None,
    key: Array | None,
    remat: bool,
    positions: ArrayLike | None,
    each: Sequence[dict[str, Any]] = (),
    **options: Any,
) -> tuple[Tokens, tuple[Cache, ...] | None]:
    """Return the tokens after all blocks and the caches after them.

    Args:
        blocks: one after another, or a stack.
        x: vectors of the tokens before the blocks.
        cache: caches of the blocks, as `init_caches` returns them.
        key: key of the dropout; None draws keys from the streams.
        remat: whether the backward pass recomputes each block.
        positions: positions of the tokens, for blocks with `rope`.
        each: further options of each block, with the layers as a first axis for those of a stack.
        options: options of all blocks.
    """
    if isinstance(blocks, Stack):
        return blocks.run(x, cache, key, remat, each, positions=positions, **options)
    caches = []
    for i, block in enumerate(blocks):
        own = {**options, **(each[i] if each else {}), "dropout_key": fold_in(key, 1 + i)}
        own["positions"] = None if block.att.rope is None else positions
        if cache is not None:
            x, extended = block(x, cache=cache[i], **own)
            caches.append(extended)
        else:
            x = recompute(block, x, own) if remat else block(x, **own)
    return x, None if cache is None else tuple(caches)


def init_caches(
    blocks: Sequence[Block] | Stack, b: int | None, capacity: int, dtype: Dtype | None
) -> tuple[Cache, ...]:
    """Return the empty caches of blocks; that of a window holds the window at least."""
    if isinstance(blocks, Stack):
        return blocks.init_cache(b, capacity, dtype)
    return tuple(_init_cache(block, b, capacity, dtype) for block in blocks)


def _init_cache(block: Block, b: int | None, capacity: int, dtype: Dtype | None) -> Cache:
    return block.init_cache(b, max(capacity, block.att.window or 0), dtype)


def pure(graph: Any, options: Any, numbers: Sequence[Any] = ()) -> Callable:
    """Return a block as a function of its state.

    The function returns the output, and the key counts that the block changed.
    """

    def run(state, x, **cache):
        copy = nnx.merge(graph, state)
        if numbers:
            give_numbers(copy, numbers)
        before = {
            path: count.get_value()
            for path, count in nnx.to_flat_state(nnx.state(copy, nnx.RngCount))
        }
        y = copy(x, **options, **cache)
        after = nnx.to_flat_state(nnx.state(copy, nnx.RngCount))
        # Only what the block changed: a model that was closed over cannot be written to.
        return y, nnx.from_flat_state(
            [(path, c) for path, c in after if c.get_value() is not before[path]]
        )

    return run


def recompute(block: Callable, x: Tokens, options: dict[str, Any]) -> Tokens:
    """Return `block(x, **options)`; the backward pass recomputes its activations."""
    graph, state = nnx.split(block)
    y, counts = jax.checkpoint(pure(graph, options))(state, x)
    nnx.update(block, counts)
    return y


def cached_positions(
    blocks: Sequence[Block] | Stack,
    cache: tuple[Cache, ...],
    t: int,
    lengths: ArrayLike | int | None,
) -> Array:
    """Return the positions of the next `t` tokens, see `Cache.positions`.

    Raises:
        ValueError: unless there is a cache for each block, as many layers long as it has.
    """
    check_caches(
        "cache", cache, len(blocks.stacked_layers if isinstance(blocks, Stack) else blocks)
    )
    if isinstance(blocks, Stack):
        for one, layers in zip(cache, blocks.stacked_layers, strict=True):
            check_stacked_cache({name: x.shape for name, x in one.arrays.items()}, len(layers))
    first = _of_layers(lambda x: x[0], cache[0]) if isinstance(blocks, Stack) else cache[0]
    return first.positions(t, lengths)


def _of_layers(change: Callable[[Array], Array], cache: Cache) -> Cache:
    """Return a cache with what it stores changed."""
    return cache.replace(**{name: change(array) for name, array in cache.arrays.items()})


def _of_first_layer(length: Any) -> Any:
    return length if isinstance(length, int) else length[0]
