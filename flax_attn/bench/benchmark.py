"""One benchmark: implementations are prepared and compared, and those that agree are timed."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from flax_attn.backends.call import Unsupported
from flax_attn.bench import timing
from flax_attn.bench.agreement import excess_error, reference
from flax_attn.bench.implementation import Implementation, PreparedCall
from flax_attn.bench.workload import Workload

GIB = 2**30
TOO_SLOW = 20.0  # seconds: what is predicted to take longer, to compile or to run, is left out
PREDICTIVE = 5.0  # seconds: shorter times are mostly fixed cost, and predict nothing

Result = TypeVar("Result")


@dataclass(frozen=True)
class Benchmark:
    """What is measured side by side.

    Args:
        section: section of the report.
        entries: implementations, each with its workload.
        limit: bytes of temporaries above which an implementation is not run.
        timed: whether the implementations are timed; False only compiles.
    """

    section: str
    entries: tuple[tuple[Implementation, Workload], ...]
    limit: int
    timed: bool = True

    @property
    def title(self) -> str:
        """What is measured, in a line."""
        return f"{self.section} {self.entries[0][1]}"


@dataclass(frozen=True)
class Measurement:
    """What was measured of one implementation.

    Args:
        section: section of the report.
        implementation: name of the implementation.
        work: workload.
        status: "timed", "compiled", or why it was not timed in a word or two.
        note: reason in a sentence.
        error: error over the allowed one; at most 1.
        compile_seconds: seconds to compile; None where nothing is compiled.
        temporaries: bytes of temporaries; None where unknown.
        seconds: seconds of a call, one figure a round.
    """

    section: str
    implementation: str
    work: Workload
    status: str = "timed"
    note: str = ""
    error: float | None = None
    compile_seconds: float | None = None
    temporaries: int | None = None
    seconds: tuple[float, ...] = ()

    @property
    def best(self) -> float | None:
        """Seconds of a call in the turn that was disturbed least; None if it was not timed."""
        return min(self.seconds) if self.seconds else None

    @property
    def flops_per_second(self) -> float | None:
        """The rate, counting the operations that the workload needs."""
        return self.work.flops / self.best if self.best else None


class NotTimed(Exception):  # noqa: N818 (a finding, not an error)
    """An implementation is not timed.

    `found` updates its measurement, with a status and a note at least.
    """

    def __init__(self, status: str, note: str, **found: Any):
        super().__init__(note)
        self.found = {"status": status, "note": note, **found}


def measure(
    benchmark: Benchmark, rounds: int, history: Sequence[Measurement] = ()
) -> list[Measurement]:
    """Return a measurement for every entry, in order.

    Args:
        benchmark: implementations and their workloads.
        rounds: number of turns of each implementation.
        history: earlier measurements, from which times that are too long are predicted.
    """
    # All are prepared before the first is timed: then nothing is compiled between the turns.
    rows: list[Measurement] = []
    runs = {}
    warm = {}
    for i, (implementation, work) in enumerate(benchmark.entries):
        row = Measurement(benchmark.section, implementation.name, work)
        try:
            _check_growth(row, history)
            prepared, row = _prepare(implementation, row, benchmark)
            if benchmark.timed:
                row, warm[i] = _compare(prepared, row)
                runs[i] = prepared.run
        # The others go on: that one refuses is a finding.
        except NotTimed as reason:
            row = replace(row, **reason.found)
        rows.append(row)
    taken = timing.interleave(runs, warm, rounds)
    for i, seconds in taken.items():
        rows[i] = replace(rows[i], seconds=tuple(seconds))
    return rows


def _prepare(
    implementation: Implementation, row: Measurement, benchmark: Benchmark
) -> tuple[PreparedCall, Measurement]:
    # A rival that is missing is named once, and costs the run nothing.
    if importlib.util.find_spec(implementation.package) is None:
        raise NotTimed("not installed", f"pip install {implementation.package}")
    prepared = _guarded(lambda: implementation.prepare(row.work))
    row = replace(row, compile_seconds=prepared.compile_seconds, temporaries=prepared.temporaries)
    if not benchmark.timed:
        return prepared, replace(row, status="compiled")
    needed = prepared.temporaries or 0
    if needed > benchmark.limit:
        raise NotTimed(
            "too large",
            f"needs {needed / GIB:.1f} GiB of temporaries, and the limit is"
            f" {benchmark.limit / GIB:.1f} GiB",
            compile_seconds=prepared.compile_seconds,
            temporaries=prepared.temporaries,
        )
    return prepared, row


def _compare(prepared: PreparedCall, row: Measurement) -> tuple[Measurement, float]:
    """Return the measurement with its error, and the seconds of a warm call."""
    results = []

    def once(repeats: int) -> None:
        results.append(prepared.run(repeats))

    seconds = _guarded(lambda: timing.seconds_per_call(once))
    exact, plain = reference(row.work)
    last = results.pop()
    found = prepared.named(last)
    error = excess_error(found, exact, plain, row.work.dtype)
    row = replace(row, error=error)
    if not error <= 1:  # NaN, too
        raise NotTimed(
            "disagrees",
            f"its error is {error:.3g} times the allowed one",
            error=error,
            compile_seconds=row.compile_seconds,
            temporaries=row.temporaries,
        )
    # The first call of a program is slower than the others, where that can be noticed.
    if seconds <= 10 * timing.TURN:
        seconds = timing.seconds_per_call(prepared.run)
    return row, seconds


def _check_growth(row: Measurement, history: Sequence[Measurement]) -> None:
    """Raise where a smaller size predicts too long a time.

    Times, and unrolled programs, grow with the pairs.
    """
    for past in history:
        growth = row.work.pairs / past.work.pairs
        same = past.implementation == row.implementation and _kind(past.work) == _kind(row.work)
        if same and growth > 1:
            _check_time("compile", past.compile_seconds, growth)
            _check_time("run", past.best, row.work.flops / past.work.flops)


def _kind(work: Workload) -> Workload:
    return replace(work, b=1, n=1, t=1, h=1, window=None)


def _check_time(step: str, seconds: float | None, growth: float) -> None:
    # Of a short time most is fixed cost, which does not grow.
    if seconds is None or seconds <= PREDICTIVE or seconds * growth <= TOO_SLOW:
        return
    note = f"would take about {seconds * growth:.0f} s to {step}, judging by a smaller size"
    raise NotTimed("too slow", f"{note}, and the limit is {TOO_SLOW:.0f} s")


def _guarded(step: Callable[[], Result]) -> Result:
    """Turn an implementation's error into the reason why it is not timed; the others go on."""
    try:
        return step()
    except Unsupported as error:
        raise NotTimed("refused", str(error)) from error
    except Exception as error:  # of any library: a run goes on with the others
        # Of some libraries a page follows the first line.
        message = str(error).partition("\n")[0]
        kind = type(error).__name__
        raise NotTimed("failed", f"{kind}: {message}") from error
