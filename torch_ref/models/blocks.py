"""The blocks of a model, one after another."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn_spec.cache_checks import check_cache_shapes, check_caches
from torch_ref.functional.cache import KVCache
from torch_ref.functional.cache_base import Cache
from torch_ref.functional.dropout import fold_in
from torch_ref.functional.outputs import Outputs
from torch_ref.functional.shapes import ArrayLike, Tokens
from torch_ref.modules.block import TransformerBlock
from torch_ref.modules.cross_block import CrossBlock

_Block = TransformerBlock | CrossBlock


class Blocks(nn.ModuleList):
    """The blocks of a model, run one after another.

    Example:
        >>> from torch_ref import GPT2, GPT2Config
        >>> config = GPT2Config(6, 2, num_layers=3, context_length=8, vocab_size=11)
        >>> len(GPT2(config).trf_blocks)
        3
    """

    def __init__(self, blocks: Iterable[_Block] = ()):
        super().__init__(blocks)

    def run(
        self,
        x: Tokens,
        *,
        cache: tuple[Cache, ...] | None,
        key: Tensor | None,
        remat: bool,
        positions: ArrayLike | None,
        each: Sequence[dict[str, Any]] = (),
        **options: Any,
    ) -> Outputs[tuple[Cache, ...]]:
        """Return the tokens after all blocks, and the caches if there are any.

        Args:
            x: vectors of the tokens before the blocks.
            cache: caches of the blocks, as `init_cache` returns them; None is no cache.
            key: key of the dropout; None draws keys from torch's generator.
            remat: whether the backward pass recomputes each block, where there is no cache.
            positions: positions of the tokens, for blocks with `rope`.
            each: further options of each block.
            options: options of all blocks.
        """
        caches = []
        for i, block in enumerate(cast(Iterable[_Block], self)):
            further = each[i] if each else {}
            own = block_options(block, i, key, positions, options | further)
            if cache is not None:
                ran = block.attend(x, cache=cache[i], **own)
                x = ran.output
                caches.append(ran.cache)
            # Not with a cache: decoding has no backward pass.
            elif remat:
                # The other form of torch's checkpoints loses keyword arguments.
                x = checkpoint(block, x, use_reentrant=False, **own)
            else:
                x = block(x, **own)
        return Outputs(x, cache=None if cache is None else tuple(caches))

    def init_cache(
        self, b: int | None, capacity: int, dtype: torch.dtype | None = None
    ) -> tuple[Cache, ...]:
        """Return an empty cache for each block."""
        blocks = cast(Iterable[_Block], self)
        return tuple(empty_cache(block, b, capacity, dtype) for block in blocks)

    def positions(
        self, cache: tuple[Cache, ...], shape: tuple[int, ...], lengths: ArrayLike | int | None
    ) -> Tensor:
        """Return the positions of the next tokens, of shape `(*b, t)`, see `Cache.positions`.

        Raises:
            ValueError: unless there is a cache for each block, made for these rows.
        """
        check_caches("cache", cache, len(self))
        *batch, t = shape
        check_cache_shapes({"rows": tuple(cache[0].batch)}, {"rows": tuple(batch)})
        return cache[0].positions(t, lengths)

    def keep(self, encoded: Tokens, lengths: ArrayLike | int | None) -> tuple[KVCache, ...]:
        """Return the keys and values of an encoder's output, for each cross block."""
        blocks = cast(Iterable[CrossBlock], self)
        return tuple(block.cross.keep(encoded, lengths) for block in blocks)


def block_options(
    block: _Block,
    layer: int,
    key: Tensor | None,
    positions: ArrayLike | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return the options of the block of a layer: those of all, a dropout key, and positions."""
    # 0 is the key of the embedding.
    dropout_key = fold_in(key, 1 + layer)
    # Without rotary positions they are in the embedding, or in the scores.
    rotated = None if block.att.rope is None else positions
    return {**options, "dropout_key": dropout_key, "positions": rotated}


def empty_cache(block: _Block, b: int | None, capacity: int, dtype: torch.dtype | None) -> Cache:
    """Return an empty cache of a block; that of a window holds the window at least."""
    return block.init_cache(b, max(capacity, block.att.window or 0), dtype)
