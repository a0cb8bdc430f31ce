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
from flax_attn.device.report import TriedTiles
from flax_attn.device.times import timed

# Queries, keys and warps of a tile; on a TPU a tile has no warps.
GPU_TILES = ((128, 64, 8), (128, 32, 8), (64, 128, 8), (64, 64, 4), (64, 32, 4), (32, 64, 4))
TPU_TILES = ((512, 512), (256, 512), (512, 1024), (128, 512), (256, 256))


def candidates(usual: TileRow) -> list[TileRow]:
    """Return the rows to try, the usual one first.

    Forward and backward are tried with the same sizes: the best of each is found in one pass.
    """
    if usual.platform == "tpu":
        sizes = [Tiling(t, s) for t, s in TPU_TILES]
    else:
        stages = (1, 2)
        sizes = [Tiling(t, s, warps, stage) for (t, s, warps), stage in product(GPU_TILES, stages)]
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
        width = max(call.arrays["query"].shape[3], call.arrays["value"].shape[3])
        if (width, usual.itemsize) in seen:
            continue
        seen.add((width, usual.itemsize))
        for row in candidates(usual._replace(width=width)):
            if clock.over(share):
                return
            yield _try(call, row, row.forward == usual.forward and row.backward == usual.backward)


def _prepared(call: ModelCall) -> Call:
    return jax.eval_shape(lambda arrays: prepare(**arrays, **call.options), call.arrays)


def _try(call: ModelCall, row: TileRow, usual: bool) -> TriedTiles:
    try:
        with tried(row):
            found = timed(call, forward(call, "fused"), forward_and_backward(call, "fused"))
    except Exception as error:  # tiles that do not fit the chip are a finding
        note = f"{type(error).__name__}: {error}".splitlines()[0]
        return TriedTiles(call.name, str(row), usual, note=note)
    return TriedTiles(call.name, str(row), usual, found.backward)
