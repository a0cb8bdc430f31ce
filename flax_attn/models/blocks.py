"""The blocks of a model, one after another."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import jax
from flax import nnx
from flax.typing import Dtype
from jaxtyping import Array

from attn_spec.cache_checks import check_cache_shapes, check_caches
from flax_attn.functional.cache import KVCache
from flax_attn.functional.cache_base import Cache
from flax_attn.functional.dropout import fold_in
from flax_attn.functional.outputs import Outputs
from flax_attn.functional.shapes import ArrayLike, Tokens
from flax_attn.models.layer_pattern import Block, give_numbers
from flax_attn.modules.cross_block import CrossBlock


class Blocks(nnx.List[Block]):
    """The blocks of a model, run one after another; `Stack` has the same methods.

    Example:
        >>> from flax_attn import GPT2, GPT2Config
        >>> config = GPT2Config(6, 2, num_layers=3, context_length=8, vocab_size=11)
        >>> len(GPT2(config, rngs=nnx.Rngs(0)).trf_blocks)
        3
    """

    def __init__(self, blocks: Iterable[Block] = ()):
        super().__init__(blocks)

    @property
    def blocks(self) -> list[Block]:
        """The blocks as they are held, each for one layer or, in a `Stack`, for several."""
        return list(self)

    @property
    def of_layers(self) -> list[Block]:
        """The block of each layer as it is held."""
        return list(self)

    def unstacked(self) -> list[Block]:
        """Return a block for each layer, with the parameters of that layer."""
        return list(self)

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
        """Return the tokens after all blocks, and the caches if there are any.

        Args:
            x: vectors of the tokens before the blocks.
            cache: caches of the blocks, as `init_cache` returns them; None is no cache.
            key: key of the dropout; None draws keys from the streams.
            remat: whether the backward pass recomputes each block, where there is no cache.
            positions: positions of the tokens, for blocks with `rope`.
            each: further options of each held block.
            options: options of all blocks.
        """
        caches = []
        for i, block in enumerate(self):
            further = each[i] if each else {}
            own = block_options(block, i, key, positions, options | further)
            if cache is not None:
                ran = block.attend(x, cache=cache[i], **own)
                x = ran.output
                caches.append(ran.cache)
            # Not with a cache: decoding has no backward pass.
            elif remat:
                x = recompute(block, x, own)
            else:
                x = block(x, **own)
        return Outputs(x, cache=None if cache is None else tuple(caches))

    def init_cache(
        self, b: int | None, capacity: int, dtype: Dtype | None = None
    ) -> tuple[Cache, ...]:
        """Return an empty cache for each held block."""
        return tuple(empty_cache(block, b, capacity, dtype) for block in self)

    def positions(
        self, cache: tuple[Cache, ...], shape: tuple[int, ...], lengths: ArrayLike | int | None
    ) -> Array:
        """Return the positions of the next tokens, of shape `(*b, t)`, see `Cache.positions`.

        Raises:
            ValueError: unless there is a cache for each held block, made for these rows.
        """
        check_caches("cache", cache, len(self))
        *batch, t = shape
        check_cache_shapes({"rows": tuple(cache[0].batch)}, {"rows": tuple(batch)})
        return cache[0].positions(t, lengths)

    def keep(self, encoded: Tokens, lengths: ArrayLike | int | None) -> tuple[KVCache, ...]:
        """Return the keys and values of an encoder's output, for each held cross block."""
        blocks = cast(Sequence[CrossBlock], self)
        return tuple(block.cross.keep(encoded, lengths) for block in blocks)


def block_options(
    block: Block,
    layer: Array | int,
    key: Array | None,
    positions: ArrayLike | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return the options of the block of a layer: those of all, a dropout key, and positions."""
    # 0 is the key of the embedding.
    dropout_key = fold_in(key, 1 + layer)
    # Without rotary positions they are in the embedding, or in the scores.
    rotated = None if block.att.rope is None else positions
    return {**options, "dropout_key": dropout_key, "positions": rotated}


def empty_cache(block: Block, b: int | None, capacity: int, dtype: Dtype | None) -> Cache:
    """Return an empty cache of a block; that of a window holds the window at least."""
    return block.init_cache(b, max(capacity, block.att.window or 0), dtype)


def pure(graph: Any, options: Any, numbers: Sequence[Any] = ()) -> Callable:
    """Return a block as a function of its state, of tokens and of a cache if there is one.

    The function returns what the block does, `Outputs` where there is a cache, and the key counts
    that the block changed.
    """

    def run(state, x, cache=None):
        copy = nnx.merge(graph, state)
        if numbers:
            give_numbers(copy, numbers)
        counts = _key_counts(copy)
        before = {path: count.get_value() for path, count in counts}
        y = copy(x, **options) if cache is None else copy.attend(x, cache=cache, **options)
        # Only what the block changed: a model that was closed over cannot be written to.
        changed = []
        for path, count in _key_counts(copy):
            if count.get_value() is not before[path]:
                changed.append((path, count))
        return y, nnx.from_flat_state(changed)

    return run


def _key_counts(block: Block) -> Any:
    return nnx.to_flat_state(nnx.state(block, nnx.RngCount))


def recompute(block: Block, x: Tokens, options: dict[str, Any]) -> Tokens:
    """Return `block(x, **options)`; the backward pass recomputes its activations."""
    graph, state = nnx.split(block)
    y, counts = jax.checkpoint(pure(graph, options))(state, x)
    nnx.update(block, counts)
    return y
