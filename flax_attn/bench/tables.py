"""A report as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from rich import box
from rich.table import Table
from rich.text import Text

from flax_attn.bench import timing
from flax_attn.bench.benchmark import Measurement
from flax_attn.bench.figures import MIB, curve, exponent, names, ratio
from flax_attn.bench.report import BenchmarkReport

COLUMNS = (
    "time ms",
    "spread",
    "turns",
    "ours / it",
    "GFLOP/s",
    "of limit",
    "temp MiB",
    "jit s",
    "error",
)
TEXTBOOK = {  # the exponents of naive time, and of memory that does not hold the scores
    ("tokens", "best"): "O(T^2 d)  2",
    ("tokens", "temporaries"): "O(T d)  1",
    ("heads", "best"): "O(T^2 d)  0",
    ("heads", "temporaries"): "O(T d)  0",
}


def tables(report: BenchmarkReport) -> list[Table]:
    """Return the benchmarks, the growth and the summary, each where there is one."""
    benchmarks = [row for row in report.rows if row.section not in ("tokens", "heads")]
    found = [_benchmarks(report, benchmarks)] if benchmarks else []
    found += [_growth(report, *which) for which in TEXTBOOK if names(report.rows, which[0])]
    return [*found, _summary(report)] if report.summary else found


def notes(report: BenchmarkReport) -> list[str]:
    """Return a line for each row not timed; what is not installed has one line in all."""
    return list(dict.fromkeys(_note(row) for row in report.rows if row.note))


def _note(row: Measurement) -> str:
    name = (
        row.implementation if row.status == "not installed" else f"{row.implementation}, {row.work}"
    )
    return f"{name}: {row.status}: {row.note}"


def _table(first: str, columns: Sequence[str], title: str | None = None) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left"
    )
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _benchmarks(report: BenchmarkReport, rows: Sequence[Measurement]) -> Table:
    table = _table("(b, n, t, h)", COLUMNS)
    for (_, size), group in groupby(rows, key=lambda row: (row.section, row.work.size)):
        table.add_row(Text(size, style="bold"))
        for row in group:
            table.add_row(f"  {_label(row)}", *_cells(report, row))
        table.add_section()
    return table


def _label(row: Measurement) -> str:
    window = f", window {row.work.window}" if row.work.window else ""
    return (
        row.implementation
        + window
        + (f", {row.work.dtype}" if row.section in ("dtype", "bfloat16", "step") else "")
    )


def _cells(report: BenchmarkReport, row: Measurement) -> list[str | Text]:
    time = (
        _number(row.best, lambda x: f"{1000 * x:.4g}")
        if row.best
        else Text(row.status, style="yellow")
    )
    return [
        time,
        _number(timing.spread(list(row.seconds)) if row.seconds else None, "{:.0%}".format),
        _number(len(row.seconds) or None, str),
        _number(ratio(report.rows, report.ours, row), "{:.2f}".format),
        _number(row.flops_per_second, lambda x: f"{x / 1e9:.1f}"),
        _number(report.of_limit(row), "{:.0%}".format),
        _number(row.temporaries, lambda x: f"{x / MIB:.4g}"),
        _number(row.compile_seconds, "{:.1f}".format),
        _number(row.error, "{:.2f}".format),
    ]


def _number(value: float | int | None, text: Callable[..., str]) -> str:
    return "-" if value is None else text(value)


def _growth(report: BenchmarkReport, over: str, cost: str) -> Table:
    rows = [row for row in report.rows if row.section == over]
    axis = {"tokens": lambda row: row.work.t, "heads": lambda row: row.work.n}[over]
    sizes = list(dict.fromkeys(axis(row) for row in rows))
    what = "time ms" if cost == "best" else "temporaries MiB"
    table = _table(over, [*map(str, sizes), "exponent"], f"{what} of forward+backward over {over}")
    for name in names(rows, over):
        cells = {axis(row): _cost(row, cost) for row in rows if row.implementation == name}
        fitted = exponent(*curve(rows, over, name, cost))
        table.add_row(
            name, *(cells.get(size, "-") for size in sizes), _number(fitted, "{:.2f}".format)
        )
    table.add_row(
        Text("textbook", style="dim"), *[""] * len(sizes), Text(TEXTBOOK[over, cost], style="dim")
    )
    return table


def _cost(row: Measurement, cost: str) -> str | Text:
    value = row.best if cost == "best" else row.temporaries
    if value is None:
        return "-" if row.status == "timed" else Text(row.status, style="yellow")
    return f"{value * 1000 if cost == 'best' else value / MIB:.4g}"


def _summary(report: BenchmarkReport) -> Table:
    table = _table("in short", ("measured",))
    for name, figure in report.summary.items():
        table.add_row(name, f"{figure:.3g}")
    return table
