"""Fair timing: implementations take turns, and each turn is long enough to be measured."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import numpy as np

# Seconds: calls are repeated to fill a turn, so that the cold start after another's turn weighs
# little.
TURN = 0.1
# Seconds before a turn: the threads of PyTorch go on spinning for a while after a call, and hold a
# core.
PAUSE = 0.02
BUDGET = 4.0  # seconds of turns, after which an implementation gets no more; each has at least two

Name = TypeVar("Name", bound=Hashable)
Repeat = Callable[[int], object]  # computes the given number of times, and waits for it


def interleave(
    runs: Mapping[Name, Repeat],
    first: Mapping[Name, float],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Name, list[float]]:
    """Return the seconds of a call, one figure a turn, of implementations that take turns.

    All run in one process. Each round begins with another one, so that none always follows the same
    one.

    Args:
        runs: runs by name.
        first: seconds of one warm call, from which the repeats of a turn follow.
        rounds: number of turns of each run.
        clock: function that returns the time in seconds.
    """
    names = list(runs)
    pause = PAUSE if clock is time.perf_counter else 0
    # Of a call that takes nothing a thousand fill a turn.
    repeats = {name: max(1, int(TURN / max(first[name], TURN / 1000))) for name in names}
    taken: dict[Name, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for name in _from(names, i):
            spent = sum(taken[name]) * repeats[name]
            if len(taken[name]) < 2 or spent < BUDGET:
                time.sleep(pause)
                seconds = seconds_per_call(runs[name], repeats[name], clock)
                taken[name].append(seconds)
    return taken


def _from(names: list[Name], i: int) -> list[Name]:
    """Return the names in turn, beginning with the one at `i`."""
    shift = i % max(len(names), 1)
    return names[shift:] + names[:shift]


def least(runs: Mapping[Name, Repeat], rounds: int) -> dict[Name, float]:
    """Return the seconds of a call of each in its least disturbed turn; one call fills a turn."""
    # As if a call took a second: so one call fills a turn.
    taken = interleave(runs, dict.fromkeys(runs, 1.0), rounds)
    return {name: min(seconds) for name, seconds in taken.items()}


def seconds_per_call(
    run: Repeat, repeats: int = 1, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds that one of `repeats` calls takes."""
    start = clock()
    run(repeats)
    return (clock() - start) / repeats


def spread(seconds: list[float]) -> float:
    """Return the interquartile range over the median.

    Example:
        >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])
        0.6666666666666666
    """
    # Of the quartiles: the slowest turn says more about other users than about the code.
    low, middle, high = np.percentile(seconds, (25, 50, 75))
    return float((high - low) / middle)
