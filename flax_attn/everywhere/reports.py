"""What was computed here and what was not: calls by their place in the user's source."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

_OURS = {"flax_attn", "attn_spec", "jaxtyping"}
# Functions of these packages and of Python's library are not the user's.
_LIBRARIES = _OURS | {"jax", "jaxlib", "flax", "keras", "equinox", "haiku"}
_LIBRARIES |= sys.stdlib_module_names - {"__main__"}


@dataclass(frozen=True)
class ReportedCall:
    """A kind of calls.

    Args:
        line: file and line in the user's source.
        place: name of the function or method that was called.
        asked: what was asked for, in a few words: shape, dtype and options.
        backend: backend that computes it; None where it is left alone.
        before: estimate of the bytes that the formula holds beside inputs and output.
        after: estimate of the bytes that the backend holds.
        reason: reason why it is left alone.
    """

    line: str
    place: str
    asked: str = ""
    backend: str | None = None
    before: int = 0
    after: int = 0
    reason: str = ""

    @property
    def taken(self) -> bool:
        """Whether it is computed here."""
        return self.backend is not None

    def __str__(self) -> str:
        if not self.taken:
            return f"{self.place}: left alone: {self.reason}"
        memory = f"{_text(self.before)} -> {_text(self.after)}"
        return f"{self.place}: {self.asked}: {self.backend}, {memory}"


@dataclass
class CallReport:
    """Calls that were traced or run while it was open, by kind, with how many there were.

    What `jax.jit` compiles is counted when it is traced, and not in each run.
    """

    counts: Counter[ReportedCall] = field(default_factory=Counter)

    @property
    def taken(self) -> dict[ReportedCall, int]:
        """The kinds that were computed here, with how many there were."""
        return {entry: count for entry, count in self.counts.items() if entry.taken}

    @property
    def left_alone(self) -> dict[ReportedCall, int]:
        """The kinds that were left alone, with how many there were."""
        return {entry: count for entry, count in self.counts.items() if not entry.taken}

    def __str__(self) -> str:
        taken = sum(self.taken.values())
        left = sum(self.left_alone.values())
        lines = [f"{taken} calls computed by flax_attn, {left} left alone (counted as traced)"]
        if not self.counts:
            lines.append(
                "No call was traced: what was compiled in an earlier block is not counted."
            )
        # Calls of one line of the source stand together below it.
        entries = sorted(self.counts, key=attrgetter("line", "place"))
        for line, calls in groupby(entries, attrgetter("line")):
            lines.append(line)
            lines += [f"  {self.counts[entry]:3} x {entry}" for entry in calls]
        return "\n".join(lines)


# All calls since the program began.
PROGRAM = CallReport()
# Blocks of other threads do not count the calls of this one.
_THREAD = threading.local()


def open_reports() -> list[CallReport]:
    """Return the reports of the blocks that this thread is in."""
    if not hasattr(_THREAD, "reports"):
        _THREAD.reports = []
    return _THREAD.reports


@contextmanager
def opened() -> Iterator[CallReport]:
    """Count the calls of this thread in a report of their own, too."""
    report = CallReport()
    open_reports().append(report)
    try:
        yield report
    finally:
        open_reports().pop()


def add(entry: ReportedCall) -> None:
    """Count a call in all reports that are open."""
    if _asks_for_shapes():
        return
    for report in (PROGRAM, *open_reports()):
        report.counts[entry] += 1


def add_left_alone(place: str, reason: str) -> None:
    """Count a call that its library computes."""
    add(ReportedCall(user_place(), place, reason=reason))


def _asks_for_shapes() -> bool:
    """Return whether Keras traces a model for its shapes alone, before it traces it to run it."""
    scopes = sys.modules.get("keras.src.backend.common.symbolic_scope")
    return scopes is not None and scopes.in_symbolic_scope()


def user_place() -> str:
    """Return file and line of the innermost function that is of no library."""
    # `traceback.extract_stack` would read the source of every frame, at every call.
    frame = sys._getframe(1)
    own = None
    while frame is not None:
        package = package_of(frame.f_globals.get("__name__", ""))
        line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if package not in _LIBRARIES:
            return line
        # The tests of a library are a part of it: then it is who called us.
        if own is None and package not in _OURS:
            own = line
        frame = frame.f_back
    return own or "unknown"


def package_of(module: str) -> str:
    """Return the name of the package that a module is in."""
    return module.partition(".")[0]


def _text(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
