"""Time, shared out fairly: contenders take turns, and each turn is long enough to be measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import numpy as np

TURN = 0.1  # seconds: calls are repeated to fill a turn, so that the cold start after another's turn weighs little
REST = 0.02  # seconds before a turn: the threads of PyTorch go on spinning for a while after a call, and hold a core
PATIENCE = 8.0  # seconds of turns, after which a contender rests; it has at least two

Name = TypeVar("Name", bound=Hashable)
Run = Callable[[int], object]  # computes so many times, and waits for it


def interleave(
    runs: Mapping[Name, Run], first: Mapping[Name, float], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[Name, list[float]]:
    """Return seconds a call, one figure a turn, of contenders that take turns in one process.

    Each round begins with another contender, so that none always follows the same one.

    Args:
        runs: by name.
        first: what a warm call took, from which the repeats of a turn follow.
        rounds: turns of each.
        clock: seconds.
    """
    names = list(runs)
    rest = REST if clock is time.perf_counter else 0
    repeats = {name: max(1, int(TURN / max(first[name], TURN / 1000))) for name in names}
    taken: dict[Name, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        shift = i % max(len(names), 1)
        for name in names[shift:] + names[:shift]:
            if len(taken[name]) < 2 or sum(taken[name]) * repeats[name] < PATIENCE:
                time.sleep(rest)
                taken[name].append(measure(runs[name], repeats[name], clock))
    return taken


def measure(run: Run, repeats: int = 1, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that one of `repeats` calls takes."""
    start = clock()
    run(repeats)
    return (clock() - start) / repeats


def median(seconds: list[float]) -> float:
    """Return the middle one."""
    return float(np.median(seconds))


def spread(seconds: list[float]) -> float:
    """Return the interquartile range over the median.

    Example:
        >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])
        0.6666666666666666
    """
    low, middle, high = np.percentile(seconds, (25, 50, 75))
    return float((high - low) / middle)
