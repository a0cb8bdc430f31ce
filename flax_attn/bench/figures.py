"""What follows from the rows: ratios, exponents of growth, and the goals they are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

import numpy as np

from flax_attn.bench.contest import Row
from flax_attn.bench.work import Work

MIB = 2**20


@dataclass(frozen=True)
class Goal:
    """A figure to reach.

    Args:
        name: what is held against it.
        limit: at most this.
        figure: what was measured; None where it was not.
    """

    name: str
    limit: float
    figure: float | None

    @property
    def verdict(self) -> str:
        """Whether it was reached."""
        return "not measured" if self.figure is None else "reached" if self.figure <= self.limit else "missed"


def ratio(rows: Iterable[Row], ours: str, row: Row) -> float | None:
    """Return the time of `ours` over that of the row, both for the same work; None where one was not timed."""
    mine = (r.median for r in rows if (r.section, r.work, r.rival) == (row.section, row.work, ours))
    seconds = next(mine, None)
    return seconds / row.median if seconds and row.median else None


def exponent(sizes: Sequence[float | int], costs: Sequence[float | int]) -> float | None:
    """Return p of the `cost = c * size ** p` that fits the larger half of the sizes best; None below two points.

    Example:
        >>> exponent([1, 10, 100, 1000], [5, 5, 7, 700])
        2.0
    """
    half = slice(len(sizes) // 2 if len(sizes) > 2 else 0, None)
    x, y = np.log(np.asarray(sizes[half], float)), np.log(np.asarray(costs[half], float))
    return round(float(np.polyfit(x, y, 1)[0]), 12) if len(x) > 1 else None


def curve(rows: Iterable[Row], section: str, rival: str, cost: str) -> tuple[list[int], list[float]]:
    """Return sizes and costs of a rival where they are known: over tokens or heads, `"median"` or `"temporaries"`."""
    mine = [row for row in rows if (row.section, row.rival) == (section, rival) and row.status == "timed"]
    known = [row for row in mine if getattr(row, cost)]
    sizes = [row.work.n if section == "heads" else row.work.t for row in known]
    return sizes, [float(getattr(row, cost)) for row in known]


def goals(rows: Sequence[Row], ours: str) -> list[Goal]:
    """Return the goals for float32 on a CPU of two cores, with what was measured of ours."""

    def ratios(section: str, rival: str, where: Callable[[Work], bool] = lambda work: True) -> list[float]:
        others = (row for row in rows if (row.section, row.rival) == (section, rival) and where(row.work))
        return [r for r in (ratio(rows, ours, row) for row in others) if r is not None]

    mine = [row for row in rows if row.rival == ours]
    long = [row.compile_seconds for row in mine if row.section == "attention" and _long(row.work)]
    memory = [row.temporaries / MIB for row in mine if row.section == "memory" and row.temporaries is not None]
    forward = ratios("attention", "torch SDPA", lambda work: not work.backward)
    both = ratios("attention", "torch SDPA", lambda work: work.backward and 512 <= work.t <= 4096)
    jax_nn = ratios("attention", "jax.nn", lambda work: work.t >= 1024)
    return [
        Goal("forward / torch SDPA, geometric mean", 0.6, _mean(forward)),
        Goal("forward / torch SDPA, largest", 0.9, _largest(forward)),
        Goal("forward+backward / torch SDPA, T 512 to 4096, geometric mean", 0.5, _mean(both)),
        Goal("forward, forward+backward / jax.nn, T from 1024, largest", 0.25, _largest(jax_nn)),
        Goal("window / full causal, largest", 0.2, _largest(_variants(mine, "window"))),
        Goal("temporaries of forward+backward, MiB", 100.0, _largest(memory)),
        Goal("layer / torch.nn.MultiheadAttention", 0.5, _largest(ratios("layer", "torch.nn.MultiheadAttention"))),
        Goal("layer / nnx.MultiHeadAttention", 0.3, _largest(ratios("layer", "nnx.MultiHeadAttention"))),
        Goal("seconds to compile forward+backward, T 8192", 5.0, _largest(long)),
        Goal("bfloat16 / float32, largest", 1.2, _largest(_variants(mine, "dtype"))),
    ]


def _long(work: Work) -> bool:
    return work.backward and work.t == 8192


def _variants(mine: Iterable[Row], section: str) -> list[float]:
    """Return the time of the second row over the first, of the pairs in a section: each direction is one."""
    found = [row.median for row in mine if row.section == section]
    return [second / first for first, second in zip(found[::2], found[1::2], strict=True) if first and second]


def _mean(values: Sequence[float]) -> float | None:
    return geometric_mean(values) if values else None


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
