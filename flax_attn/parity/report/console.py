"""Reports for people at a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flax_attn.parity import tolerance
from flax_attn.parity.check import Check
from flax_attn.parity.report import wording
from flax_attn.parity.report.report import Report

COLUMNS = (
    "forward",
    "gradients",
    "float32",
    "jit = eager",
    "dropout",
    "unbatched",
    "cache = full",
    "layouts",
    "training",
)

_LOW, _LOW_GRADIENT = f"{tolerance.LOW_FORWARD:.0f}x", f"{tolerance.LOW_GRADIENT:.0f}x"

LEGEND = f"""\
forward      float64: largest error over largest value, outputs and weights         rule {tolerance.FORWARD:.0e}
gradients    float64: every parameter and input, under random cotangents            rule {tolerance.GRADIENT:.0e}
float32      error over the allowed one: {_LOW} PyTorch's own, {_LOW_GRADIENT} for gradients         rule 1
jit = eager  float64: compiled against eager                                        rule {tolerance.FORWARD:.0e}
dropout      float64: train mode with one dropout key, outputs and gradients        rule {tolerance.GRADIENT:.0e}
unbatched    float64: one example without a batch axis                              rule {tolerance.FORWARD:.0e}
cache = full float64: in chunks and steps with a cache, both sides                  rule {tolerance.FORWARD:.0e}
layouts      weight layouts that come back bit for bit, every element in its place
training     float64: losses and parameters over 100 steps of AdamW, dropout on     rule {tolerance.TRAINING:.0e}
margin       how far below its rule the worst check is;  -  does not apply"""


def variants(reports: Sequence[Report]) -> Table:
    """Return one row a variant."""
    rows = _table("variant", no_wrap=True)
    for column in (*COLUMNS, "margin", ""):
        rows.add_column(column, justify="right", no_wrap=True)
    for report in reports:
        cells = [_cell(report.check(column)) for column in COLUMNS]
        rows.add_row(Text(report.name), *cells, wording.margin(report.margin), _verdict(report))
    return rows


def verdict(report: Report) -> Group:
    """Return one comparison in full: the verdict, the ladder, where the sides part, and how to repeat it."""
    return Group(*_verdict_parts(report))


def notes(reports: Sequence[Report]) -> list[str]:
    """Return a line for every report with gradients that are rounding only."""
    found = [(report.name, report.check("gradients")) for report in reports]
    return [f"{name}: {check.note}" for name, check in found if check is not None and check.note]


def failures(reports: Sequence[Report]) -> list[str]:
    """Return a line for every check that does not hold."""
    return [f"{report.name}: {check.explain()}" for report in reports for check in report.failed]


def _table(first: str, **options: Any) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, **options)
    return table


def _cell(check: Check | None) -> Text:
    if check is None or not check.ran:
        return Text("-", style="dim")
    if check.name == "layouts" and check.passed:
        return Text(str(len(check.note.split(", "))))
    return Text(wording.error(check), style="" if check.passed else "bold red")


def _verdict(report: Report) -> Text:
    return Text(wording.verdict(report), style="green" if report.passed else "bold red")


def _verdict_parts(report: Report) -> Iterator[RenderableType]:
    # What matters most stands last, right above the prompt.
    yield Text.assemble((report.name, "bold"), ": ", _verdict(report), f"\n{wording.reason(report)}")
    yield _ladder([check for check in report.checks if check.ran])
    yield from _titled("not run", (_missing(check) for check in report.checks if not check.ran), "dim")
    yield from _titled("notes", report.notes)
    if report.divergence is not None:
        yield from _titled("where they part", str(report.divergence).splitlines())
    yield from _titled("repeat", [report.command] if report.command else [])


def _ladder(checks: Sequence[Check]) -> Table:
    rows = _table("check", no_wrap=True)
    for column in ("error", "rule", "margin"):
        rows.add_column(column, justify="right", no_wrap=True)
    rows.add_column("")
    rows.add_column("worst tensor", overflow="fold")
    for check in checks:
        style, mark = ("", "holds") if check.passed else ("bold red", "FAILS")
        name, error, mark = (Text(text, style) for text in (check.name, wording.error(check), mark))
        worst = Text.assemble(wording.worst(check), (f"\n{check.note}" if check.note else "", "dim"))
        rows.add_row(name, error, wording.rule(check), wording.margin(check.margin), mark, worst)
    return rows


def _missing(check: Check) -> str:
    return f"{check.name}: {check.skipped}" + (", and it was asked for by name: FAILS" if check.wanted else "")


def _titled(title: str, lines: Iterable[str], style: str = "") -> Iterator[RenderableType]:
    text = Text("\n".join(lines), style=style)
    if text:
        yield Text(title, style="bold")
        yield Padding(text, (0, 0, 1, 2), expand=False)
