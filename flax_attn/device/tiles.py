"""Tiles of `fused`, tried on calls of each width, as rows of its table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import jax

from flax_attn.backends.call import Call, prepare
from flax_attn.backends.fused.kernel import Tiling
from flax_attn.backends.fused.tilings import TileRow, row_of, tried
from flax_attn.bench.calls import ModelCall, forward, forward_and_backward
from flax_attn.device.clock import Clock
from flax_attn.device.report import TriedTiles, first_line
from flax_attn.device.times import timed

# Queries, keys and warps of a tile; on a TPU a tile has no warps.
GPU_TILES = ((128, 64, 8), (128, 32, 8), (64, 128, 8), (64, 64, 4), (64, 32, 4), (32, 64, 4))
TPU_TILES = ((512, 512), (256, 512), (512, 1024), (128, 512), (256, 256))


def candidates(usual: TileRow) -> list[TileRow]:
    """Return the rows to try, the usual one first.

    Forward and backward are tried with the same sizes: the best of each is found in one pass.
    """
    if usual.platform == "tpu":
        sizes = [Tiling(*tile) for tile in TPU_TILES]
    else:
        # Keys are loaded while those before are computed on, or are not.
        sizes = [Tiling(*tile, stages) for tile, stages in product(GPU_TILES, (1, 2))]
    return [usual, *(usual._replace(forward=size, backward=size) for size in sizes)]


def tried_tiles(
    calls: Sequence[ModelCall], clock: Clock, share: float = 1.0
) -> Iterator[TriedTiles]:
    """Yield the times of tiles on one call of each width, until a share of the time is spent."""
    seen = set()
    for call in calls:
        if clock.over(share):
            return
        usual = row_of(_prepared(call))
        arrays = call.arrays
        width = max(arrays["query"].shape[3], arrays["value"].shape[3])
        kind = width, usual.itemsize
        # Other calls of this width have the same row.
        if kind in seen:
            continue
        seen.add(kind)
        sizes = usual.forward, usual.backward
        for row in candidates(usual._replace(width=width)):
            if clock.over(share):
                return
            same = sizes == (row.forward, row.backward)
            yield _try(call, row, same)


def _prepared(call: ModelCall) -> Call:
    return jax.eval_shape(lambda arrays: prepare(**arrays, **call.options), call.arrays)


def _try(call: ModelCall, row: TileRow, usual: bool) -> TriedTiles:
    try:
        with tried(row):
            found = timed(call, forward(call, "fused"), forward_and_backward(call, "fused"))
    # Tiles that do not fit the chip are a finding.
    except Exception as error:
        return TriedTiles(call.name, str(row), usual, note=first_line(error))
    return TriedTiles(call.name, str(row), usual, found.backward)
