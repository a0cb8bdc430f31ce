"""Reports for people at a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from flax_attn.parity import tolerance
from flax_attn.parity.check import Check
from flax_attn.parity.report import Report

COLUMNS = ("forward", "gradients", "float32", "jit = eager", "dropout", "unbatched", "layouts", "training")

_LOW, _LOW_GRADIENT = f"{tolerance.LOW_FORWARD:.0f}x", f"{tolerance.LOW_GRADIENT:.0f}x"

LEGEND = f"""\
forward      float64: largest error over largest value, outputs and weights         rule {tolerance.FORWARD:.0e}
gradients    float64: every parameter and input, under random cotangents            rule {tolerance.GRADIENT:.0e}
float32      error over the allowed one: {_LOW} PyTorch's own, {_LOW_GRADIENT} for gradients         rule 1
jit = eager  float64: compiled against eager                                        rule {tolerance.FORWARD:.0e}
dropout      float64: train mode with one dropout key, outputs and gradients        rule {tolerance.GRADIENT:.0e}
unbatched    float64: one example without a batch axis                              rule {tolerance.FORWARD:.0e}
layouts      weight layouts that come back bit for bit, every element in its place
training     float64: losses and parameters over 100 steps of AdamW, dropout on     rule {tolerance.TRAINING:.0e}
margin       how far below its rule the worst check is;  -  does not apply"""


def variants(reports: Sequence[Report]) -> Table:
    """Return one row a variant."""
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    rows.add_column("variant", no_wrap=True)
    for column in (*COLUMNS, "margin", ""):
        rows.add_column(column, justify="right", no_wrap=True)
    for report in reports:
        cells = [_cell(report.check(column)) for column in COLUMNS]
        rows.add_row(report.name, *cells, _margin(report.margin), _verdict(report.passed))
    return rows


def _cell(check: Check | None) -> Text:
    if check is None or not check.ran:
        return Text("-", style="dim")
    if check.name == "layouts" and check.passed:
        return Text(str(len(check.note.split(", "))))
    shown = f"{check.error:.2f}" if check.limit == 1 else f"{check.error:.1e}"
    return Text(shown, style="" if check.passed else "bold red")


def _margin(margin: float) -> str:
    return f"{margin:.1f}x" if margin < 100 else f"{margin:.0f}x"


def _verdict(good: bool) -> Text:
    return Text("equal", style="green") if good else Text("DIFFERENT", style="bold red")


def notes(reports: Sequence[Report]) -> list[str]:
    """Return a line for every report with gradients that are rounding only."""
    found = [(report.name, report.check("gradients")) for report in reports]
    return [f"{name}: {check.note}" for name, check in found if check is not None and check.note]


def failures(reports: Sequence[Report]) -> list[str]:
    """Return a line for every check that does not hold."""
    return [f"{report.name}: {check.explain()}" for report in reports for check in report.failed]
