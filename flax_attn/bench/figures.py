"""Figures from the measurements: ratios, exponents of growth, and a summary of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import geometric_mean

import numpy as np

from flax_attn.bench.benchmark import Measurement
from flax_attn.bench.workload import Workload

MIB = 2**20


def ratio(rows: Iterable[Measurement], ours: str, row: Measurement) -> float | None:
    """Return the time of `ours` over that of the row for the same workload, None if not timed."""
    mine = (
        r.best
        for r in rows
        if (r.section, r.work, r.implementation) == (row.section, row.work, ours)
    )
    seconds = next(mine, None)
    return seconds / row.best if seconds and row.best else None


def exponent(sizes: Sequence[float | int], costs: Sequence[float | int]) -> float | None:
    """Return p of the `cost = c * size ** p` that best fits the larger half; None below two points.

    Example:
        >>> exponent([1, 10, 100, 1000], [5, 5, 7, 700])
        2.0
    """
    half = slice(len(sizes) // 2 if len(sizes) > 2 else 0, None)
    x, y = np.log(np.asarray(sizes[half], float)), np.log(np.asarray(costs[half], float))
    return round(float(np.polyfit(x, y, 1)[0]), 12) if len(x) > 1 else None


def curve(
    rows: Iterable[Measurement], section: str, name: str, cost: str
) -> tuple[list[int], list[float]]:
    """Return the sizes and the costs of one implementation.

    Sizes are tokens or heads; costs are `"best"` or `"temporaries"`.
    """
    mine = [
        row
        for row in rows
        if (row.section, row.implementation) == (section, name) and row.status == "timed"
    ]
    known = [row for row in mine if getattr(row, cost)]
    sizes = [row.work.n if section == "heads" else row.work.t for row in known]
    return sizes, [float(getattr(row, cost)) for row in known]


def names(rows: Sequence[Measurement], section: str) -> list[str]:
    """Return the implementations of a section, in order."""
    return list(dict.fromkeys(row.implementation for row in rows if row.section == section))


def summary(rows: Sequence[Measurement], ours: str) -> dict[str, float]:
    """Return the figures that say most about ours, those that were measured."""

    def ratios(
        section: str, name: str, where: Callable[[Workload], bool] = lambda work: True
    ) -> list[float]:
        others = (
            row
            for row in rows
            if (row.section, row.implementation) == (section, name) and where(row.work)
        )
        return [r for r in (ratio(rows, ours, row) for row in others) if r is not None]

    mine = [row for row in rows if row.implementation == ours]
    long = [row.compile_seconds for row in mine if row.section == "attention" and _long(row.work)]
    memory = [
        row.temporaries / MIB
        for row in mine
        if row.section == "memory" and row.temporaries is not None
    ]
    forward = ratios("attention", "torch SDPA", lambda work: not work.backward)
    both = ratios("attention", "torch SDPA", lambda work: work.backward and 512 <= work.t <= 4096)
    jax_nn = ratios("attention", "jax.nn", lambda work: work.t >= 1024)
    half = ratios("bfloat16", "torch SDPA")
    steps = {
        t: ratios("step", "torch SDPA", lambda work, t=t: work.dtype == t)
        for t in ("float32", "bfloat16")
    }
    found = {
        "forward / torch SDPA, geometric mean": _mean(forward),
        "forward / torch SDPA, largest": _largest(forward),
        "forward+backward / torch SDPA, T 512 to 4096, geometric mean": _mean(both),
        "forward, forward+backward / jax.nn, T from 1024, largest": _largest(jax_nn),
        "window / full causal, largest": _largest(_second_over_first(mine, "window")),
        "temporaries of forward+backward, MiB": _largest(memory),
        "layer / torch.nn.MultiheadAttention": _largest(
            ratios("layer", "torch.nn.MultiheadAttention")
        ),
        "layer / nnx.MultiHeadAttention": _largest(ratios("layer", "nnx.MultiHeadAttention")),
        "seconds to compile forward+backward, T 8192": _largest(long),
        "bfloat16 forward / torch SDPA": _largest(half),
        "decoding step / torch SDPA, float32": _largest(steps["float32"]),
        "decoding step / torch SDPA, bfloat16": _largest(steps["bfloat16"]),
        "forward+backward / torch SDPA, largest": _largest(
            ratios("attention", "torch SDPA", lambda w: w.backward)
        ),
        "bfloat16 / float32, largest": _largest(_second_over_first(mine, "dtype")),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def _long(work: Workload) -> bool:
    return work.backward and work.t == 8192


def _second_over_first(mine: Iterable[Measurement], section: str) -> list[float]:
    """Return the time of the second row over the first, for the two directions of a section."""
    found = [row.best for row in mine if row.section == section]
    return [
        second / first
        for first, second in zip(found[::2], found[1::2], strict=True)
        if first and second
    ]


def _mean(values: Sequence[float]) -> float | None:
    return geometric_mean(values) if values else None


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
