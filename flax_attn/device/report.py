"""What a check of a device found, as JSON and as a page."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flax_attn.convert.replacing import replacing

MIB = 2**20
STATUSES = ("equal", "differs", "failed", "refused", "not reached")
INTERPRETED = "No accelerator is attached: `fused` ran in Pallas's interpreter, and was not timed."


@dataclass(frozen=True)
class Judgement:
    """A backend on one small call.

    Args:
        backend: name of the backend.
        call: name of the call.
        dtype: dtype of the call.
        status: `"equal"`, `"differs"`, `"refused"`, `"failed"` or `"not reached"`.
        error: largest error over the allowed one; at most 1 is equal.
        note: reason of a refusal or a failure.
    """

    backend: str
    call: str
    dtype: str
    status: str
    error: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Timing:
    """A kernel on the call of a model.

    Args:
        call: name of the call.
        kernel: name of the kernel.
        ours: whether it is a backend of ours that `"auto"` may take.
        chosen: whether `"auto"` takes it.
        status: `"timed"`, `"refused"`, `"failed"` or `"not reached"`.
        forward: seconds of the output.
        backward: seconds of the output and the gradients.
        temporaries: bytes beside arguments and outputs with the gradients; None where unknown.
        predicted: predicted seconds of the output; None on a CPU.
        note: reason of a refusal or a failure.
    """

    call: str
    kernel: str
    ours: bool
    chosen: bool
    status: str
    forward: float | None = None
    backward: float | None = None
    temporaries: int | None = None
    predicted: float | None = None
    note: str = ""


@dataclass(frozen=True)
class TriedTiles:
    """One size of tiles of `fused` on the call of a model.

    Args:
        call: name of the call.
        row: row of the table of tiles, as Python.
        usual: whether the table has these tiles now.
        seconds: seconds of the output and the gradients; None where it failed.
        note: reason of a failure.
    """

    call: str
    row: str
    usual: bool
    seconds: float | None = None
    note: str = ""


@dataclass
class DeviceReport:
    """All that was found.

    Args:
        machine: description of what the figures depend on.
        interpreted: whether `fused` ran in Pallas's interpreter, where nothing says how fast it is.
        judgements: backends on small calls.
        timings: kernels on calls of models.
        tiles: tiles of `fused`.
    """

    machine: dict[str, Any]
    interpreted: bool
    judgements: list[Judgement] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    tiles: list[TriedTiles] = field(default_factory=list)

    @property
    def wrong(self) -> list[Judgement]:
        """What differs from the reference, or fails."""
        return [one for one in self.judgements if one.status in ("differs", "failed")]

    @property
    def slower(self) -> dict[str, tuple[Timing, Timing]]:
        """By call: what `"auto"` takes, and the backend that was faster, where one was."""
        found = {}
        for one in self._timed():
            fastest = self._fastest(one.call)
            if one.chosen and fastest is not one:
                found[one.call] = one, fastest
        return found

    def _timed(self) -> list[Timing]:
        """Return the backends of ours on the calls on which their time is known."""
        return [one for one in self.timings if one.ours and one.forward is not None]

    def _fastest(self, call: str) -> Timing:
        own = [one for one in self._timed() if one.call == call]
        return min(own, key=lambda one: one.forward or 0.0)

    @property
    def best_tiles(self) -> dict[str, TriedTiles]:
        """The fastest tiles of each call."""
        groups: dict[str, list[TriedTiles]] = {}
        for one in self.tiles:
            if one.seconds is not None:
                groups.setdefault(one.call, []).append(one)
        return {call: min(own, key=lambda one: one.seconds or 0.0) for call, own in groups.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        slower = {call: [pair[0].kernel, pair[1].kernel] for call, pair in self.slower.items()}
        best = {call: one.row for call, one in self.best_tiles.items()}
        return asdict(self) | {"slower": slower, "best_tiles": best}

    def write(self, path: str) -> None:
        """Write the JSON to `path`, and the page beside it, as Markdown."""
        with replacing(path) as whole:
            whole.write_text(json.dumps(self.as_dict(), indent=2) + "\n")
        with replacing(page_beside(path)) as whole:
            whole.write_text(page(self))


def page_beside(path: str) -> str:
    """Return the name of the page beside a JSON file.

    Example:
        >>> page_beside("found.json")
        'found.md'
    """
    return f"{path.removesuffix('.json')}.md"


def page(report: DeviceReport) -> str:
    """Return the page."""
    parts = [
        f"# {report.machine['device']} ({report.machine['platform']})",
        _machine(report),
        "## Conformance",
        _conformance(report),
        "## Times",
        _times(report),
        "## Tiles of `fused`",
        _tiles(report),
    ]
    return "\n\n".join(parts) + "\n"


def _machine(report: DeviceReport) -> str:
    text = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    return f"{text}\n\n{INTERPRETED}" if report.interpreted else text


def _conformance(report: DeviceReport) -> str:
    groups = _by_backend(report.judgements)
    heading = "backend", "dtype", *STATUSES, "largest error"
    rows = [(*group, *_counts(own)) for group, own in groups.items()]
    legend = "Errors are over the allowed ones: at most 1 is equal."
    wrong = [_wrong(one) for one in report.wrong]
    return "\n\n".join([table([heading, *rows]), legend, *wrong])


def _by_backend(judgements: Sequence[Judgement]) -> dict[tuple[str, str], list[Judgement]]:
    """Return the judgements of each backend in each dtype."""
    groups: dict[tuple[str, str], list[Judgement]] = {}
    for one in judgements:
        groups.setdefault((one.backend, one.dtype), []).append(one)
    return groups


def _counts(judgements: Sequence[Judgement]) -> list[str]:
    """Return how many judgements have each status, and their largest error."""
    counts = Counter(one.status for one in judgements)
    errors = [one.error for one in judgements if one.error is not None]
    largest = max(errors, default=0.0)
    return [*(str(counts[status]) for status in STATUSES), f"{largest:.2f}"]


def _wrong(one: Judgement) -> str:
    error = "" if one.error is None else f", error {one.error:.3g} times the allowed one"
    return f"**{one.status}**: {one.backend}, {one.call}, {one.dtype}{error} {one.note}".rstrip()


def _times(report: DeviceReport) -> str:
    heading = "call", "kernel", "forward ms", "with backward ms", "predicted ms", "MiB", "note"
    rows = [_timing(one) for one in report.timings]
    lines = [_slower(*pair) for pair in report.slower.values()]
    return "\n\n".join([table([heading, *rows]), *lines])


def _slower(chosen: Timing, other: Timing) -> str:
    names = f"`auto` takes {chosen.kernel} for {chosen.call}, and {other.kernel} was faster"
    return f"{names}: {milliseconds(other.forward)} of {milliseconds(chosen.forward)} ms."


def _timing(one: Timing) -> tuple[str, ...]:
    memory = "" if one.temporaries is None else f"{one.temporaries / MIB:.1f}"
    kernel = f"**{one.kernel}** (auto)" if one.chosen else one.kernel
    timed = one.status == "timed"
    note = one.note if timed else f"{one.status}: {one.note}"
    return (
        one.call,
        kernel,
        milliseconds(one.forward),
        milliseconds(one.backward),
        milliseconds(one.predicted),
        memory,
        note,
    )


def _tiles(report: DeviceReport) -> str:
    if not report.tiles:
        return "None were tried."
    heading = "call", "tiles", "with backward ms", "note"
    rows = [_row_of_tiles(one) for one in report.tiles]
    # As they are pasted into flax_attn/backends/fused/tilings.py.
    best = [f"    {one.row},  # {call}" for call, one in report.best_tiles.items()]
    return "\n".join([table([heading, *rows]), "", "```python", *best, "```"])


def _row_of_tiles(one: TriedTiles) -> tuple[str, ...]:
    usual = " (usual)" if one.usual else ""
    return one.call, f"`{one.row}`{usual}", milliseconds(one.seconds), one.note


def milliseconds(seconds: float | None) -> str:
    """Return seconds as text in milliseconds, nothing for None."""
    return "" if seconds is None else f"{1000 * seconds:.4g}"


def table(rows: Iterable[Sequence[str]]) -> str:
    """Return rows as a table in Markdown, of which the first is the heading."""
    heading, *others = rows
    lines = [heading, ("---",) * len(heading), *others]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    # A bar or a new line would end the cell.
    return text.replace("|", "\\|").replace("\n", " ")


def first_line(error: Exception) -> str:
    r"""Return the name of an error and the first line of its message: compilers write pages.

    Example:
        >>> first_line(ValueError("too large\nat line 7"))
        'ValueError: too large'
    """
    return f"{type(error).__name__}: {error}".splitlines()[0]
