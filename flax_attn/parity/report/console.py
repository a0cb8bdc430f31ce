"""Reports as a terminal shows them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flax_attn.convert.rules import Entry
from flax_attn.parity import tolerance
from flax_attn.parity.check import Check
from flax_attn.parity.report import wording
from flax_attn.parity.report.findings import Findings

PAIRS = 30  # the most that are listed
_LOW, _LOW_GRADIENT = f"{tolerance.LOW_FORWARD:.0f}x", f"{tolerance.LOW_GRADIENT:.0f}x"
_COLUMNS = {  # what is measured, and the rule
    "forward": (
        "float64: largest error over largest value, outputs and weights",
        f"{tolerance.FORWARD:.0e}",
    ),
    "gradients": (
        "float64: every parameter and input, under random cotangents",
        f"{tolerance.GRADIENT:.0e}",
    ),
    "float32": (
        f"error over the allowed one: {_LOW} PyTorch's own, {_LOW_GRADIENT} for gradients",
        "1",
    ),
    "jit = eager": ("float64: compiled against eager", f"{tolerance.FORWARD:.0e}"),
    "dropout": (
        "float64: train mode with one dropout key, outputs and gradients",
        f"{tolerance.GRADIENT:.0e}",
    ),
    "unbatched": ("float64: one example without a batch axis", f"{tolerance.FORWARD:.0e}"),
    "cache = full": (
        "float64: in chunks and steps with a cache, in both frameworks",
        f"{tolerance.FORWARD:.0e}",
    ),
    "training": (
        "float64: losses and parameters over 100 steps of AdamW, dropout on",
        f"{tolerance.TRAINING:.0e}",
    ),
    "layouts": (
        "layouts of weights with a round trip bit for bit, every element in its place",
        "0",
    ),
}


def variants(reports: Sequence[Findings]) -> Table:
    """Return the table of reports, a row for each."""
    rows, columns = _table("variant", no_wrap=True), _columns(reports)
    for column in (*columns, "margin", ""):
        rows.add_column(column, justify="right", no_wrap=True)
    for report in reports:
        cells = [_cell(report.check(column)) for column in columns]
        rows.add_row(Text(report.name), *cells, wording.margin(report.margin), _verdict(report))
    return rows


def legend(reports: Sequence[Findings]) -> str:
    """Return a line for every column of the table of reports."""
    lines = [
        f"{name:12} {_COLUMNS[name][0]:76} rule {_COLUMNS[name][1]}" for name in _columns(reports)
    ]
    return "\n".join(
        [*lines, "margin       how far below its rule the worst check is;  -  does not apply"]
    )


def _columns(reports: Sequence[Findings]) -> list[str]:
    return [name for name in _COLUMNS if any(report.check(name) for report in reports)]


def verdict(report: Findings) -> Group:
    """Return a full report: verdict, causes, where the sides differ, checks, pairs."""
    return Group(*_parts(report))


def text(report: Findings, width: int = 120) -> str:
    """Return one report in full as plain text."""
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, highlight=False, force_jupyter=False).print(
        verdict(report)
    )
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def notes(reports: Sequence[Findings]) -> list[str]:
    """Return a line for every report with gradients that are zero but for rounding."""
    found = [(report.name, report.check("gradients")) for report in reports]
    return [f"{name}: {check.note}" for name, check in found if check is not None and check.note]


def failures(reports: Sequence[Findings]) -> list[str]:
    """Return a line for every check that does not hold."""
    return [f"{report.name}: {check.explain()}" for report in reports for check in report.failed]


def _table(first: str, **options: Any) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, **options)
    return table


def _cell(check: Check | None) -> Text:
    if check is not None and check.nothing:
        return Text("nothing", style="bold red")
    if check is None or not check.ran:
        return Text("-", style="dim")
    if check.name == "layouts" and check.passed:
        return Text(str(len(check.note.split(", "))))
    return Text(wording.error(check), style="" if check.passed else "bold red")


def _verdict(report: Findings) -> Text:
    return Text(wording.verdict(report), style="green" if report.passed else "bold red")


def _parts(report: Findings) -> Iterator[RenderableType]:
    yield Text.assemble(
        (report.name, "bold"), ": ", _verdict(report), f"\n{wording.reason(report)}\n"
    )
    yield from _titled("causes", report.causes)
    yield from _titled("where they differ", report.where)
    yield _checks([check for check in report.checks if check.ran])
    yield from _titled(
        "nothing compared",
        (_missing(check) for check in report.checks if check.nothing),
        "bold red",
    )
    yield from _titled(
        "not run", (_missing(check) for check in report.checks if check.skipped), "dim"
    )
    if report.entries:
        yield from _pairs(report.entries)
    yield from _titled("notes", report.notes)
    yield from _titled("repeat", [report.command] if report.command else [])


def _checks(checks: Sequence[Check]) -> Table:
    rows = _table("check", no_wrap=True)
    for column in ("error", "rule", "margin"):
        rows.add_column(column, justify="right", no_wrap=True)
    rows.add_column("")
    rows.add_column("worst tensor", overflow="fold")
    for check in sorted(checks, key=lambda check: check.passed):
        style, mark = ("", "holds") if check.passed else ("bold red", "FAILS")
        name, error, mark = (Text(text, style) for text in (check.name, wording.error(check), mark))
        worst = Text.assemble(
            wording.worst(check), (f"\n{check.note}" if check.note else "", "dim")
        )
        rows.add_row(name, error, wording.rule(check), wording.margin(check.margin), mark, worst)
    return rows


def _pairs(entries: Sequence[Entry]) -> Iterator[RenderableType]:
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("torch", "shape", "flax", "shape", "flax to torch"):
        rows.add_column(column, overflow="fold")
    for entry in entries[:PAIRS]:
        shapes = "\n".join(" ".join(map(str, shape)) for shape in entry.shapes)
        cells = (
            entry.theirs,
            " ".join(map(str, entry.shape)),
            "\n".join(entry.ours),
            shapes,
            wording.change(entry),
        )
        rows.add_row(*map(Text, cells))
    yield Text("pairs of parameters", style="bold")
    yield rows
    if len(entries) > PAIRS:
        yield Text(f"and {len(entries) - PAIRS} more, in report.entries\n", style="dim")


def _missing(check: Check) -> str:
    if check.nothing:
        return f"{check.name}: {check.nothing}: FAILS"
    return f"{check.name}: {check.skipped}" + (
        ", and it was asked for by name: FAILS" if check.wanted else ""
    )


def _titled(title: str, lines: Iterable[str], style: str = "") -> Iterator[RenderableType]:
    text = Text("\n".join(lines), style=style)
    if text:
        yield Text(title, style="bold")
        yield Padding(text, (0, 0, 1, 2), expand=False)
