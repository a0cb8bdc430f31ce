"""What is measured: the tables of sizes, as contests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flax_attn.bench.contest import GIB, Contest
from flax_attn.bench.functions import functions, ours
from flax_attn.bench.layers import layers
from flax_attn.bench.rivals import Rival
from flax_attn.bench.work import Work

Shape = tuple[int, int, int, int]

BACKENDS = {
    "cpu": ("auto", "reference"),  # where auto is blocked
    "gpu": ("auto", "cudnn", "tokamax", "blocked", "reference"),
    "tpu": ("auto", "splash", "blocked", "reference"),
}
DTYPES = {"cpu": "float32", "gpu": "bfloat16", "tpu": "bfloat16"}
GROWTH_LIMIT = 4 * GIB


@dataclass(frozen=True)
class Sizes:
    """The sizes `(b, n, t, h)` of every section; the sections without sizes are left out.

    Args:
        shapes: all rivals, forward and forward+backward.
        long: ours, full causal against `window`.
        window: keys in all.
        low: ours, bfloat16 against float32.
        memory: temporaries, compiled only.
        layer: whole layers.
        growth: over these tokens with the second number of `heads`, then over `heads` with the middle of these tokens.
        heads: numbers of heads that share `width`.
        width: of all heads together.
    """

    shapes: tuple[Shape, ...]
    long: Shape | None = None
    window: int = 512
    low: Shape | None = None
    memory: Shape | None = None
    layer: Shape | None = None
    growth: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    width: int = 512


FULL = Sizes(
    shapes=((4, 12, 256, 64), (8, 12, 1024, 64), (1, 32, 2048, 128), (1, 12, 4096, 64), (1, 12, 8192, 64)),
    long=(1, 12, 8192, 64),
    low=(8, 12, 1024, 64),
    memory=(1, 8, 8192, 64),
    layer=(2, 12, 1024, 64),  # GPT-2 small
    growth=(128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    heads=(1, 8, 16),
)
QUICK = Sizes(
    shapes=((3, 4, 192, 32),),
    long=(1, 2, 512, 16),
    window=64,
    low=(1, 4, 256, 32),
    memory=(1, 2, 1024, 32),
    layer=(2, 4, 96, 16),
    growth=(64, 128, 256),
    heads=(1, 2),
    width=64,
)


def contests(sizes: Sizes, backends: Sequence[str], platform: str) -> list[Contest]:
    """Return all contests, smaller sizes first, so that it is foreseen what would take too long."""
    rivals, dtype = functions(backends, platform), DTYPES[platform]
    best, in_jax = [ours(backends[0])], [rival for rival in rivals if rival.package == "jax"]
    plan = [_contest("attention", rivals, shape, dtype, b) for shape in sizes.shapes for b in (False, True)]
    if sizes.long:
        widths = ({}, {"window": sizes.window})
        plan += [_contest("window", best, sizes.long, dtype, b, widths) for b in (False, True)]
    if sizes.low:
        dtypes = ({"dtype": "float32"}, {"dtype": "bfloat16"})
        plan += [_contest("dtype", best, sizes.low, dtype, b, dtypes) for b in (False, True)]
    if sizes.memory:
        plan += [_contest("memory", in_jax, sizes.memory, dtype, timed=False)]
    if sizes.layer:
        plan += [_contest("layer", layers(backends), sizes.layer, dtype, variants=({"layer": True},))]
    middle = sizes.growth[len(sizes.growth) // 2] if sizes.growth else 0
    by_tokens = [(1, sizes.heads[1], t, sizes.width // sizes.heads[1]) for t in sizes.growth]
    by_heads = [(1, n, middle, sizes.width // n) for n in sizes.heads]
    plan += [_contest("tokens", rivals, shape, dtype, limit=GROWTH_LIMIT) for shape in by_tokens]
    return plan + [_contest("heads", rivals, shape, dtype, limit=GROWTH_LIMIT) for shape in by_heads]


def _contest(
    section: str,
    rivals: Sequence[Rival],
    shape: Shape,
    dtype: str,
    backward: bool = True,
    variants: Sequence[dict[str, Any]] = ({},),
    limit: int | None = None,
    timed: bool = True,
) -> Contest:
    works = [Work(*shape, **{"backward": backward, "dtype": dtype, **variant}) for variant in variants]
    entries = tuple((rival, work) for rival in rivals for work in works)
    return Contest(section, entries, memory_to_use() if limit is None else limit, timed)


def memory_to_use() -> int:
    """Return a third of the bytes of memory of this machine: what a contender may take at most."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 3
