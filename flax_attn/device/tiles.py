"""Tiles of `fused`, tried on calls of each width, as rows of its table."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import jax

from flax_attn.backends.call import Call, prepare
from flax_attn.backends.fused.kernel import Tiling
from flax_attn.backends.fused.tilings import TileRow, row_of, tried
from flax_attn.bench.calls import ModelCall, forward, forward_and_backward
from flax_attn.device.calls import drawn
from flax_attn.device.clock import Clock
from flax_attn.device.report import TriedTiles, first_line
from flax_attn.device.threads import in_threads
from flax_attn.device.times import Measure, Numbers, compiled

# Queries, keys and warps of a tile; on a TPU a tile has no warps.
GPU_TILES = ((128, 64, 8), (128, 32, 8), (64, 128, 8), (64, 64, 4), (64, 32, 4), (32, 64, 4))
TPU_TILES = ((512, 512), (256, 512), (512, 1024), (128, 512), (256, 256))


def candidates(usual: TileRow) -> list[TileRow]:
    """Return the rows to try, the usual one first.

    All kernels are tried with the same sizes: the best of each is found in one pass.
    """
    if usual.platform == "tpu":
        sizes = [Tiling(*tile) for tile in TPU_TILES]
    else:
        # Keys are loaded while those before are computed on, or are not.
        sizes = [Tiling(*tile, stages) for tile, stages in product(GPU_TILES, (1, 2))]
    return [usual, *(usual._replace(forward=size, backward=size, keys=size) for size in sizes)]


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
        own = usual._replace(width=width)
        for row, measure, numbers in _all_compiled(call, own):
            if clock.over(share):
                return
            yield _try(call, row, row == own, measure, numbers)


def _all_compiled(
    call: ModelCall, usual: TileRow
) -> Iterator[tuple[TileRow, Measure | str, Numbers]]:
    rows = candidates(usual)
    numbers = drawn(call)
    measures = list(in_threads(partial(_compiled, call, row) for row in rows))
    for row, measure in zip(rows, measures, strict=True):
        yield row, measure, numbers


def _prepared(call: ModelCall) -> Call:
    return jax.eval_shape(lambda arrays: prepare(**arrays, **call.options), call.arrays)


def _compiled(call: ModelCall, row: TileRow) -> Measure | str:
    """Return what times the tiles, or why they do not fit the chip: that is a finding."""
    try:
        with tried(row):
            return compiled(call, forward(call, "fused"), forward_and_backward(call, "fused"))
    except Exception as error:
        return first_line(error)


def _try(
    call: ModelCall, row: TileRow, usual: bool, measure: Measure | str, numbers: Numbers
) -> TriedTiles:
    result = partial(TriedTiles, call.name, str(row), usual)
    if isinstance(measure, str):
        return result(note=measure)
    try:
        return result(measure(numbers).backward)
    # Of a driver: the other tiles go on.
    except Exception as error:
        return result(note=first_line(error))
