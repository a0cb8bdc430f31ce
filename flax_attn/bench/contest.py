"""One contest: every contender is admitted or told why not, and those that agree are timed in turns."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flax_attn.backends.call import Unsupported
from flax_attn.bench import timing
from flax_attn.bench.layers import layer_truth
from flax_attn.bench.rivals import Prepared, Rival
from flax_attn.bench.truth import attention_truth, excess
from flax_attn.bench.work import Work

GIB = 2**30
TOO_SLOW = 60.0  # seconds: what would by its growth take longer, to compile or to run, is left out
TELLING = 5.0  # seconds: shorter ones are mostly fixed cost, and say nothing about growth


@dataclass(frozen=True)
class Contest:
    """What is measured side by side.

    Args:
        section: of the report.
        entries: who does what.
        limit: bytes of temporaries above which a contender is not run.
        timed: False only compiles.
    """

    section: str
    entries: tuple[tuple[Rival, Work], ...]
    limit: int
    timed: bool = True

    @property
    def title(self) -> str:
        """What is being measured, in a line."""
        return f"{self.section} {self.entries[0][1]}"


@dataclass(frozen=True)
class Row:
    """What was measured of one contender.

    Args:
        section: of the report.
        rival: name.
        work: what it did.
        status: timed, compiled, or in a word why it was not.
        note: the reason in a sentence.
        error: over the allowed one; at most 1.
        compile_seconds: None where nothing is compiled.
        temporaries: bytes; None where unknown.
        seconds: of a call, one figure a round.
    """

    section: str
    rival: str
    work: Work
    status: str = "timed"
    note: str = ""
    error: float | None = None
    compile_seconds: float | None = None
    temporaries: int | None = None
    seconds: tuple[float, ...] = ()

    @property
    def median(self) -> float | None:
        """Seconds of a call; None if it was not timed."""
        return timing.median(list(self.seconds)) if self.seconds else None

    @property
    def flops_per_second(self) -> float | None:
        """What was achieved, by the operations that the work needs."""
        return self.work.flops / self.median if self.median else None


class Refused(Exception):  # noqa: N818 (a finding, not a fault)
    """A contender is not timed; `found` is what its row then says, a status and a note at least."""

    def __init__(self, status: str, note: str, **found: Any):
        super().__init__(note)
        self.found = {"status": status, "note": note, **found}


def hold(contest: Contest, rounds: int, history: Sequence[Row] = ()) -> list[Row]:
    """Return a row for every contender, in order.

    Args:
        contest: who does what.
        rounds: turns of each.
        history: what was measured before, from which it is foreseen what would take too long.
    """
    rows: list[Row] = []
    runs, warm = {}, {}
    for i, (rival, work) in enumerate(contest.entries):
        row = Row(contest.section, rival.name, work)
        try:
            _foresee(row, history)
            prepared, row = _admit(rival, row, contest)
            if contest.timed:
                row, warm[i] = _judge(prepared, row)
                runs[i] = prepared.run
        except Refused as reason:
            row = replace(row, **reason.found)
        rows.append(row)
    taken = timing.interleave(runs, warm, rounds)
    return [replace(row, seconds=tuple(taken[i])) if i in taken else row for i, row in enumerate(rows)]


def _admit(rival: Rival, row: Row, contest: Contest) -> tuple[Prepared, Row]:
    if importlib.util.find_spec(rival.package) is None:
        raise Refused("absent", f"not installed: pip install {rival.package}")
    prepared = _guarded(lambda: rival.prepare(row.work))
    known = {"compile_seconds": prepared.compile_seconds, "temporaries": prepared.temporaries}
    need = prepared.temporaries or 0
    if contest.timed and need > contest.limit:
        note = f"needs {need / GIB:.1f} GiB of temporaries, and the limit is {contest.limit / GIB:.1f} GiB"
        raise Refused("too large", note, **known)
    return prepared, replace(row, status="timed" if contest.timed else "compiled", **known)


def _judge(prepared: Prepared, row: Row) -> tuple[Row, float]:
    """Return the row with its error, and the seconds of a call that is warm."""
    results = []
    seconds = _guarded(lambda: timing.measure(lambda repeats: results.append(prepared.run(repeats))))
    truth, plain = (layer_truth if row.work.layer else attention_truth)(row.work)
    error = excess(prepared.named(results.pop()), truth, plain, row.work.dtype)
    row = replace(row, error=error)
    if not error <= 1:
        known = {"compile_seconds": row.compile_seconds, "temporaries": row.temporaries}
        raise Refused("disagrees", f"its error is {error:.3g} times the allowed one", error=error, **known)
    return row, seconds if seconds > 10 * timing.TURN else timing.measure(prepared.run)


def _foresee(row: Row, history: Sequence[Row]) -> None:
    """Refuse what grew out of bounds at smaller sizes already: time, and unrolled programs, grow with the pairs."""
    for past in history:
        one, other = (replace(work, b=1, n=1, t=1, h=1, window=None) for work in (past.work, row.work))
        growth = {"compile": row.work.pairs / past.work.pairs, "run": row.work.flops / past.work.flops}
        if past.rival != row.rival or one != other or growth["compile"] <= 1:
            continue
        for step, seconds in (("compile", past.compile_seconds), ("run", past.median)):
            if (seconds or 0) > TELLING and (seconds or 0) * growth[step] > TOO_SLOW:
                note = f"would take about {(seconds or 0) * growth[step]:.0f} s to {step}, judging by a smaller size"
                raise Refused("too slow", f"{note}, and the limit is {TOO_SLOW:.0f} s")


def _guarded(step: Callable):
    """Turn whatever a contender raises into the reason why it is not timed: one failure must not end the others."""
    try:
        return step()
    except Unsupported as error:
        raise Refused("refused", str(error)) from error
    except Exception as error:
        raise Refused(
            "failed", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
