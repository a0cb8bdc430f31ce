"""What a check of a device found, as JSON and as a page."""

from __future__ import annotations

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
        for call in dict.fromkeys(one.call for one in self.timings):
            own = [x for x in self.timings if x.call == call and x.ours and x.forward is not None]
            chosen = next((one for one in own if one.chosen), None)
            fastest = min(own, key=lambda one: one.forward or 0.0, default=None)
            if chosen and fastest and fastest is not chosen:
                found[call] = chosen, fastest
        return found

    @property
    def best_tiles(self) -> dict[str, TriedTiles]:
        """The fastest tiles of each call."""
        found: dict[str, TriedTiles] = {}
        for one in self.tiles:
            best = found.get(one.call)
            if one.seconds is None:
                continue
            if best is None or best.seconds is None or one.seconds < best.seconds:
                found[one.call] = one
        return found

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
    rows: list[Sequence[str]] = [("backend", "dtype", *STATUSES, "largest error")]
    groups = dict.fromkeys((one.backend, one.dtype) for one in report.judgements)
    for group in groups:
        own = [one for one in report.judgements if (one.backend, one.dtype) == group]
        counts = Counter(one.status for one in own)
        shown = [str(counts[status]) for status in STATUSES]
        errors = [one.error for one in own if one.error is not None]
        largest = max(errors, default=0.0)
        rows.append((*group, *shown, f"{largest:.2f}"))
    legend = "Errors are over the allowed ones: at most 1 is equal."
    wrong = [_wrong(one) for one in report.wrong]
    return "\n\n".join([table(rows), legend, *wrong])


def _wrong(one: Judgement) -> str:
    error = "" if one.error is None else f", error {one.error:.3g} times the allowed one"
    return f"**{one.status}**: {one.backend}, {one.call}, {one.dtype}{error} {one.note}".rstrip()


def _times(report: DeviceReport) -> str:
    heading = "call", "kernel", "forward ms", "with backward ms", "predicted ms", "MiB", "note"
    rows: list[Sequence[str]] = [heading, *(_timing(one) for one in report.timings)]
    lines = []
    for call, (chosen, other) in report.slower.items():
        taken = milliseconds(chosen.forward)
        least = milliseconds(other.forward)
        names = f"`auto` takes {chosen.kernel} for {call}, and {other.kernel} was faster"
        lines.append(f"{names}: {least} of {taken} ms.")
    return "\n\n".join([table(rows), *lines])


def _timing(one: Timing) -> tuple[str, ...]:
    memory = "" if one.temporaries is None else f"{one.temporaries / MIB:.1f}"
    return (
        one.call,
        f"**{one.kernel}** (auto)" if one.chosen else one.kernel,
        milliseconds(one.forward),
        milliseconds(one.backward),
        milliseconds(one.predicted),
        memory,
        one.note if one.status == "timed" else f"{one.status}: {one.note}",
    )


def _tiles(report: DeviceReport) -> str:
    if not report.tiles:
        return "None were tried."
    rows = [("call", "tiles", "with backward ms", "note")]
    for one in report.tiles:
        usual = " (usual)" if one.usual else ""
        seconds = milliseconds(one.seconds)
        rows.append((one.call, f"`{one.row}`{usual}", seconds, one.note))
    # As they are pasted into flax_attn/backends/fused/tilings.py.
    best = [f"    {one.row},  # {call}" for call, one in report.best_tiles.items()]
    return "\n".join([table(rows), "", "```python", *best, "```"])


def milliseconds(seconds: float | None) -> str:
    """Return seconds as text in milliseconds, nothing for None."""
    return "" if seconds is None else f"{1000 * seconds:.4g}"


def table(rows: Iterable[Sequence[str]]) -> str:
    """Return rows as a table in Markdown, of which the first is the heading."""
    heading, *others = rows
    lines = [heading, ("---",) * len(heading), *others]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
