"""The whole suite: which sizes are measured, and one run over them."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from flax_attn.backends.registry import BACKENDS, check_backend, load
from flax_attn.bench import machine
from flax_attn.bench.benchmark import GIB, Benchmark, Measurement, measure
from flax_attn.bench.functions import functions, ours, steps
from flax_attn.bench.implementation import Implementation
from flax_attn.bench.layers import layers
from flax_attn.bench.report import BenchmarkReport
from flax_attn.bench.workload import Workload

Shape = tuple[int, int, int, int]

DTYPES = {"cpu": "float32", "gpu": "bfloat16", "tpu": "bfloat16"}
# Width of a matrix product that takes a few milliseconds at least.
PRODUCT = {"cpu": 2048, "gpu": 8192, "tpu": 8192}
STEP_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Sizes:
    """The sizes `(b, n, t, h)` of every section; the sections without sizes are left out.

    Args:
        shapes: sizes for all implementations, forward and forward+backward.
        long: sizes for ours, full causal against `window`.
        window: a sliding window, in keys.
        low: sizes for ours, bfloat16 against float32.
        half: sizes for ours and PyTorch in bfloat16, forward.
        step: sizes of a step of decoding over so many keys, in float32 and in bfloat16.
        memory: sizes for temporaries, compiled only.
        layer: sizes of whole layers.
        growth: numbers of tokens, with the second number of `heads`; then `heads` vary, with the
            middle of these numbers.
        heads: numbers of heads that share `width`.
        width: width of all heads together.
        limit: bytes of temporaries above which an implementation is left out, as it is above a
            third of the memory.
    """

    shapes: tuple[Shape, ...]
    long: Shape | None = None
    window: int = 512
    low: Shape | None = None
    half: Shape | None = None
    step: Shape | None = None
    memory: Shape | None = None
    layer: Shape | None = None
    growth: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    width: int = 512
    limit: int | None = None


FULL = Sizes(
    shapes=(
        (4, 12, 256, 64),
        (8, 12, 1024, 64),
        (1, 32, 2048, 128),
        (1, 12, 4096, 64),
        (1, 12, 8192, 64),
    ),
    long=(1, 12, 8192, 64),
    low=(8, 12, 1024, 64),
    half=(4, 12, 512, 64),
    step=(1, 12, 4096, 64),
    memory=(1, 8, 8192, 64),
    layer=(2, 12, 1024, 64),  # GPT-2 small
    growth=(256, 512, 1024, 2048, 4096),
    heads=(1, 8, 16),
    # What holds all scores takes most of the time of a run, and shows how it grows before this.
    limit=2 * GIB,
)
QUICK = Sizes(
    shapes=((3, 4, 192, 32),),
    long=(1, 2, 512, 16),
    window=64,
    low=(1, 4, 256, 32),
    half=(1, 4, 128, 32),
    step=(1, 12, 256, 32),
    memory=(1, 2, 1024, 32),
    layer=(2, 4, 96, 16),
    growth=(64, 128, 256),
    heads=(1, 2),
    width=64,
)


def run(
    shapes: Sequence[Shape] = (),
    backends: Sequence[str] = (),
    rounds: int = 7,
    quick: bool = False,
    progress: Callable[[Sequence[Benchmark], Benchmark], None] = lambda suite, benchmark: None,
) -> BenchmarkReport:
    """Run all benchmarks and return what they measured.

    Args:
        shapes: sizes `(b, n, t, h)`, instead of the table and of all sections but the first.
        backends: our backends, the first being the one that ratios are about; none is the usual
            ones of the platform.
        rounds: number of turns of each implementation.
        quick: whether shapes are small.
        progress: function called before each benchmark with all of them and this one.

    Raises:
        ValueError: if a backend is unknown.
    """
    for backend in backends:
        check_backend(backend)
    platform = jax.default_backend()
    backends = backends or default_backends(platform)
    name = "given" if shapes else "quick" if quick else "full"
    sizes = {"given": Sizes(tuple(shapes)), "quick": QUICK, "full": FULL}[name]
    suite = benchmarks(sizes, backends, platform)
    # Measured before and after, since a machine may be slower for a while.
    rows: list[Measurement] = []
    limit = machine.product_limit(DTYPES[platform], PRODUCT[platform])
    for benchmark in suite:
        progress(suite, benchmark)
        rows += measure(benchmark, rounds, rows)
    limit = max(limit, machine.product_limit(DTYPES[platform], PRODUCT[platform]))
    return BenchmarkReport(f"ours {backends[0]}", name, limit, machine.describe(), tuple(rows))


def default_backends(platform: str) -> tuple[str, ...]:
    """Return `auto`, the backends of this platform alone, and `blocked`.

    Example:
        >>> default_backends("tpu")
        ('auto', 'splash', 'fused', 'blocked')
    """
    # The formula is in no table but that of growth: it is the reference, and no rival.
    special = [name for name in BACKENDS if platform in (load(name).platforms or ())]
    special = [name for name in special if name != "native"]  # which auto takes, where it was built
    return ("auto", *special, "blocked")


def benchmarks(sizes: Sizes, backends: Sequence[str], platform: str) -> list[Benchmark]:
    """Return all benchmarks, smaller sizes first, so that times that are too long are predicted."""
    dtype = DTYPES[platform]
    limit = min(machine.memory_limit(), sizes.limit or sys.maxsize)
    make = partial(_benchmark, dtype=dtype, limit=limit)
    everyone, best = functions(backends, platform), [ours(backends[0])]
    suite = []
    for shape in sizes.shapes:
        suite += [make("attention", everyone, shape, backward=b) for b in (False, True)]
    if sizes.long:
        variants = ({}, {"window": sizes.window})
        suite += [make("window", best, sizes.long, variants, backward=b) for b in (False, True)]
    if sizes.low:
        variants = ({"dtype": "float32"}, {"dtype": "bfloat16"})
        suite += [make("dtype", best, sizes.low, variants, backward=b) for b in (False, True)]
    if sizes.half:
        rivals = [one for one in everyone if one.package == "torch"]
        variants = ({"dtype": "bfloat16"},)
        suite.append(make("bfloat16", best + rivals, sizes.half, variants, backward=False))
    if sizes.step:
        for name in STEP_DTYPES:
            variants = ({"step": True, "dtype": name},)
            suite.append(make("step", steps(platform), sizes.step, variants, backward=False))
    # What the formula costs, its growth shows: the reference is one of ours there.
    growing = functions(dict.fromkeys((*backends, "reference")), platform)
    if sizes.memory:
        in_jax = [one for one in growing if one.package == "jax"]
        suite.append(make("memory", in_jax, sizes.memory, timed=False))
    if sizes.layer:
        suite.append(make("layer", layers(backends), sizes.layer, ({"layer": True},)))
    for section, shape in _growth(sizes):
        suite.append(make(section, growing, shape))
    return suite


def _growth(sizes: Sizes) -> Iterator[tuple[str, Shape]]:
    """Yield the sections and sizes that grow in tokens, and then in heads of the same width."""
    for t in sizes.growth:
        heads = sizes.heads[1]
        yield "tokens", (1, heads, t, sizes.width // heads)
    for n in sizes.heads:
        middle = sizes.growth[len(sizes.growth) // 2]
        yield "heads", (1, n, middle, sizes.width // n)


def _benchmark(
    section: str,
    implementations: Sequence[Implementation],
    shape: Shape,
    variants: Sequence[dict[str, Any]] = ({},),
    *,
    dtype: str,
    limit: int,
    backward: bool = True,
    timed: bool = True,
) -> Benchmark:
    entries = []
    for implementation in implementations:
        for variant in variants:
            options = {"backward": backward, "dtype": dtype, **variant}
            entries.append((implementation, Workload(*shape, **options)))
    return Benchmark(section, tuple(entries), limit, timed)
