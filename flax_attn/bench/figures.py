"""Figures from the measurements: ratios, exponents of growth, and a summary of ours."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import geometric_mean

import numpy as np

from flax_attn.bench.benchmark import Measurement
from flax_attn.bench.workload import Workload

MIB = 2**20


def ratio(rows: Iterable[Measurement], ours: str, row: Measurement) -> float | None:
    """Return the time of `ours` over that of the row for the same workload, None if not timed."""
    for other in rows:
        same = other.section == row.section and other.work == row.work
        if same and other.implementation == ours:
            # A row that was not timed has no seconds, ours or the other one.
            return other.best / row.best if other.best and row.best else None
    return None


def exponent(sizes: Sequence[float | int], costs: Sequence[float | int]) -> float | None:
    """Return p of the `cost = c * size ** p` that best fits the larger half; None below two points.

    Example:
        >>> exponent([1, 10, 100, 1000], [5, 5, 7, 700])
        2.0
    """
    # Small sizes are fixed cost, which does not grow.
    first = len(sizes) // 2 if len(sizes) > 2 else 0
    x = np.log(np.asarray(sizes[first:], float))
    y = np.log(np.asarray(costs[first:], float))
    return round(float(np.polyfit(x, y, 1)[0]), 12) if len(x) > 1 else None


def curve(
    rows: Iterable[Measurement], section: str, name: str, cost: str
) -> tuple[list[int], list[float]]:
    """Return the sizes and the costs of one implementation.

    Sizes are tokens or heads; costs are `"best"` or `"temporaries"`.
    """
    mine = [row for row in rows if row.section == section and row.implementation == name]
    known = [row for row in mine if row.status == "timed" and getattr(row, cost)]
    sizes = [row.work.n if section == "heads" else row.work.t for row in known]
    return sizes, [float(getattr(row, cost)) for row in known]


def names(rows: Sequence[Measurement], section: str) -> list[str]:
    """Return the implementations of a section, in order."""
    return list(dict.fromkeys(row.implementation for row in rows if row.section == section))


def summary(rows: Sequence[Measurement], ours: str) -> dict[str, float]:
    """Return the figures that say most about ours, those that were measured."""
    ratios = partial(_ratios, rows, ours)
    # Ratios are of our time to that of another one: below 1 we are faster.
    mine = [row for row in rows if row.implementation == ours]
    long = [row.compile_seconds for row in mine if row.section == "attention" and _long(row.work)]
    memory = [row.temporaries for row in mine if row.section == "memory"]
    forward = ratios("attention", "torch SDPA", lambda work: not work.backward)
    backward = ratios("attention", "torch SDPA", lambda work: work.backward)
    # Where PyTorch's fixed costs do not count any more, nor the memory that its formula takes yet.
    middle = ratios("attention", "torch SDPA", lambda work: work.backward and 512 <= work.t <= 4096)
    jax_nn = ratios("attention", "jax.nn", lambda work: work.t >= 1024)
    torch_layer = ratios("layer", "torch.nn.MultiheadAttention")
    nnx_layer = ratios("layer", "nnx.MultiHeadAttention")
    half = ratios("bfloat16", "torch SDPA")
    step = ratios("step", "torch SDPA", lambda work: work.dtype == "float32")
    half_step = ratios("step", "torch SDPA", lambda work: work.dtype == "bfloat16")
    found = {
        "forward / torch SDPA, geometric mean": _mean(forward),
        "forward / torch SDPA, largest": _largest(forward),
        "forward+backward / torch SDPA, T 512 to 4096, geometric mean": _mean(middle),
        "forward, forward+backward / jax.nn, T from 1024, largest": _largest(jax_nn),
        "window / full causal, largest": _largest(_second_over_first(mine, "window")),
        "temporaries of forward+backward, MiB": _largest(_mib(one) for one in memory),
        "layer / torch.nn.MultiheadAttention": _largest(torch_layer),
        "layer / nnx.MultiHeadAttention": _largest(nnx_layer),
        "seconds to compile forward+backward, T 8192": _largest(long),
        "bfloat16 forward / torch SDPA": _largest(half),
        "decoding step / torch SDPA, float32": _largest(step),
        "decoding step / torch SDPA, bfloat16": _largest(half_step),
        "forward+backward / torch SDPA, largest": _largest(backward),
        "bfloat16 / float32, largest": _largest(_second_over_first(mine, "dtype")),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def _ratios(
    rows: Sequence[Measurement],
    ours: str,
    section: str,
    name: str,
    where: Callable[[Workload], bool] = lambda work: True,
) -> list[float]:
    """Return the ratios to one other implementation that are known."""
    others = [row for row in rows if row.section == section and row.implementation == name]
    found = [ratio(rows, ours, row) for row in others if where(row.work)]
    return [one for one in found if one is not None]


def _mib(count: int | None) -> float | None:
    return None if count is None else count / MIB


def _long(work: Workload) -> bool:
    return work.backward and work.t == 8192


def _second_over_first(mine: Iterable[Measurement], section: str) -> list[float]:
    """Return the time of the second row over the first, for the two directions of a section."""
    # Of each direction the rows are pairs, in the order in which the suite made them.
    found = [row.best for row in mine if row.section == section]
    pairs = zip(found[::2], found[1::2], strict=True)
    return [second / first for first, second in pairs if first and second]


def _mean(values: Sequence[float]) -> float | None:
    return geometric_mean(values) if values else None


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
