"""Reports as a terminal shows them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flax_attn.convert.entry import Entry
from flax_attn.parity import tolerance
from flax_attn.parity.check import Check
from flax_attn.parity.report import wording
from flax_attn.parity.report.findings import Findings
from flax_attn.parity.report.state import next_steps

# The most pairs that are listed, and the most lines of a short report.
PAIRS, LINES = 30, 60
_LOW, _LOW_GRADIENT = f"{tolerance.LOW_FORWARD:.0f}x", f"{tolerance.LOW_GRADIENT:.0f}x"
# What is measured in each column, and the rule.
_COLUMNS = {
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
    "bfloat16": ("as float32", "1"),
    "float16": ("as float32", "1"),
    "jit = eager": ("float64: compiled against eager", f"{tolerance.FORWARD:.0e}"),
    "many rows": (
        "float64: compiled against eager for 40,000 tokens, once for each class",
        f"{tolerance.FORWARD:.0e}",
    ),
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
    columns = _columns(reports)
    rows = _table("variant", numbers=(*columns, "margin", ""))
    for report in reports:
        cells = [_cell(report.check(column)) for column in columns]
        rows.add_row(Text(report.name), *cells, wording.margin(report.margin), _verdict(report))
    return rows


def legend(reports: Sequence[Findings]) -> str:
    """Return a line for every column of the table of reports."""
    lines = []
    for name in _columns(reports):
        measured, rule = _COLUMNS[name]
        lines.append(f"{name:12} {measured:76} rule {rule}")
    lines.append("margin       how far below its rule the worst check is;  -  does not apply")
    return "\n".join(lines)


def _columns(reports: Sequence[Findings]) -> list[str]:
    return [name for name in _COLUMNS if any(report.check(name) for report in reports)]


def verdict(report: Findings) -> Group:
    """Return a full report: verdict, causes, where the sides differ, checks, pairs."""
    return Group(*_parts(report, pairs=True))


def text(report: Findings, width: int = 120) -> str:
    """Return one report in full as plain text."""
    file = io.StringIO()
    # A notebook would get HTML, and nothing in the file.
    plain = {"color_system": None, "highlight": False, "force_jupyter": False}
    Console(file=file, width=width, **plain).print(verdict(report))
    return "\n".join(_stripped(file.getvalue()))


def short(report: Findings, console: Console, lines: int = LINES) -> str:
    """Return what fits of a report into some lines, the verdict first, without the pairs."""
    with console.capture() as capture:
        console.print(Group(*_parts(report, pairs=False)))
    shown = _stripped(capture.get())
    if len(shown) > lines:
        # The last line says how many there would be.
        kept = lines - 1
        left = len(shown) - kept
        shown = [*shown[:kept], f"{left} more lines: --full shows all"]
    return "\n".join(shown)


def _stripped(printed: str) -> list[str]:
    # Tables pad their last column.
    return [line.rstrip() for line in printed.rstrip().splitlines()]


def notes(reports: Sequence[Findings]) -> list[str]:
    """Return a line for every report with gradients that are zero except for rounding."""
    found = [(report.name, report.check("gradients")) for report in reports]
    return [f"{name}: {check.note}" for name, check in found if check is not None and check.note]


def failures(reports: Sequence[Findings]) -> list[str]:
    """Return a line for every check that does not hold."""
    return [f"{report.name}: {check.explain()}" for report in reports for check in report.failed]


def _table(name: str = "", numbers: Iterable[str] = ()) -> Table:
    """Return a table without rows: a column of names, if any, then columns of numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    if name:
        table.add_column(name, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _cell(check: Check | None) -> Text:
    if check is None or check.skipped:
        return Text("-", style="dim")
    if check.nothing:
        return Text("nothing", style="bold red")
    error = wording.error(check)
    if not check.passed:
        return Text(error, style="bold red")
    if check.name == "layouts":
        # How many there are.
        count = check.note.count(", ") + 1
        return Text(str(count))
    return Text(error)


def _verdict(report: Findings) -> Text:
    return Text(wording.verdict(report), style="green" if report.passed else "bold red")


def _parts(report: Findings, pairs: bool) -> Iterator[RenderableType]:
    yield _heading(report)
    yield from _titled("tested", [report.coverage.lines])
    yield from _titled("not tested", report.coverage.untested, "yellow")
    yield from _titled("what they compute differently", report.where)
    yield from _titled("look at next", next_steps(report))
    yield _checks(report.ran)
    yield from _titled("nothing compared", map(_missing, report.compared_nothing), "bold red")
    # One that applies and was not tried stands above, as not tested.
    skipped = [_missing(check) for check in report.checks if check.skipped and not check.untested]
    yield from _titled("not run", skipped, "dim")
    if report.mutants is not None:
        # The first line counts them.
        counted = next(report.mutants.lines())
        yield from _titled("mutants", [counted])
    yield from _titled("notes", report.notes)
    yield from _titled("repeat", [report.command])
    if pairs and report.entries:
        yield from _pairs(report.entries)


def _heading(report: Findings) -> Text:
    weaker = f" ({report.weaker})" if report.loosened else ""
    reason = f"{weaker}\n{wording.reason(report)}\n"
    return Text.assemble((report.name, "bold"), ": ", _verdict(report), reason)


def _checks(checks: Sequence[Check]) -> Table:
    rows = _table("check", numbers=("error", "rule", "margin"))
    rows.add_column("")
    rows.add_column("worst tensor", overflow="fold")
    for check in sorted(checks, key=lambda check: check.passed):
        style = "" if check.passed else "bold red"
        rows.add_row(
            Text(check.name, style),
            Text(wording.error(check), style),
            wording.rule(check),
            wording.margin(check.margin),
            Text("holds" if check.passed else "FAILS", style),
            _worst(check),
        )
    return rows


def _worst(check: Check) -> Text:
    note = f"\n{check.note}" if check.note else ""
    return Text.assemble(wording.worst(check), (note, "dim"))


def _pairs(entries: Sequence[Entry]) -> Iterator[RenderableType]:
    rows = _table()
    for column in ("torch", "shape", "flax", "shape", "flax to torch"):
        rows.add_column(column, overflow="fold")
    # A model has hundreds of them, and a terminal few lines.
    for entry in entries[:PAIRS]:
        cells = (
            entry.theirs,
            _sizes(entry.shape),
            "\n".join(entry.ours),
            "\n".join(map(_sizes, entry.shapes)),
            wording.change(entry),
        )
        rows.add_row(*map(Text, cells))
    yield Text("pairs of parameters", style="bold")
    yield rows
    if len(entries) > PAIRS:
        yield Text(f"and {len(entries) - PAIRS} more, in the page and in JSON\n", style="dim")


def _sizes(shape: Sequence[int]) -> str:
    return " ".join(map(str, shape))


def _missing(check: Check) -> str:
    if check.nothing:
        return f"{check.name}: {check.nothing}: FAILS"
    wanted = ", and it was asked for by name: FAILS" if check.wanted else ""
    return f"{check.name}: {check.skipped}{wanted}"


def _titled(title: str, lines: Iterable[str], style: str = "") -> Iterator[RenderableType]:
    text = Text("\n".join(lines), style=style)
    if text:
        yield Text(title, style="bold")
        yield Padding(text, (0, 0, 1, 2), expand=False)
