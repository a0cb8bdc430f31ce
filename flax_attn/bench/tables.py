"""A report as tables."""

from collections.abc import Sequence

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
    # Growth has tables of its own, sizes beside each other.
    benchmarks = [row for row in report.rows if row.section not in ("tokens", "heads")]
    found = [_benchmarks(report, benchmarks)] if benchmarks else []
    found += [_growth(report, *which) for which in TEXTBOOK if names(report.rows, which[0])]
    return [*found, _summary(report)] if report.summary else found


def notes(report: BenchmarkReport) -> list[str]:
    """Return a line for each row not timed; what is not installed has one line in all."""
    return list(dict.fromkeys(_note(row) for row in report.rows if row.note))


def _note(row: Measurement) -> str:
    name = row.implementation
    if row.status != "not installed":
        name += f", {row.work}"
    return f"{name}: {row.status}: {row.note}"


def _table(first: str, columns: Sequence[str], title: str | None = None) -> Table:
    # As plain as it can be: the tables are copied into documentation.
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title=title,
        title_justify="left",
    )
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _benchmarks(report: BenchmarkReport, rows: Sequence[Measurement]) -> Table:
    table = _table("(b, t, n, h)", COLUMNS)
    previous = None
    for row in rows:
        group = row.section, row.work.size
        if group != previous:
            if previous is not None:
                table.add_section()
            heading = Text(row.work.size, style="bold")
            table.add_row(heading)
        cells = _cells(report, row)
        table.add_row(f"  {_label(row)}", *cells)
        previous = group
    table.add_section()
    return table


def _label(row: Measurement) -> str:
    found = row.implementation
    if row.work.window:
        found += f", window {row.work.window}"
    # Elsewhere all rows have one dtype.
    if row.section in ("dtype", "bfloat16", "step"):
        found += f", {row.work.dtype}"
    return found


def _cells(report: BenchmarkReport, row: Measurement) -> list[str | Text]:
    spread = timing.spread(list(row.seconds)) if row.seconds else None
    return [
        f"{1000 * row.best:.4g}" if row.best else Text(row.status, style="yellow"),
        _number(spread, "{:.0%}"),
        _number(len(row.seconds) or None, "{}"),
        _number(ratio(report.rows, report.ours, row), "{:.2f}"),
        _number(row.flops_per_second, "{:.1f}", 1e9),
        _number(report.of_limit(row), "{:.0%}"),
        _number(row.temporaries, "{:.4g}", MIB),
        _number(row.compile_seconds, "{:.1f}"),
        _number(row.error, "{:.2f}"),
    ]


def _number(value: float | int | None, text: str, unit: float | int = 1) -> str:
    if value is None:
        return "-"
    return text.format(value if unit == 1 else value / unit)


def _growth(report: BenchmarkReport, over: str, cost: str) -> Table:
    rows = [row for row in report.rows if row.section == over]
    sizes = list(dict.fromkeys(_size(row, over) for row in rows))
    what = "time ms" if cost == "best" else "temporaries MiB"
    title = f"{what} of forward+backward over {over}"
    table = _table(over, [*map(str, sizes), "exponent"], title)
    for name in names(rows, over):
        # A curve may end before the others do, where it gets too slow.
        shown: dict[int, str | Text] = dict.fromkeys(sizes, "-")
        for row in rows:
            if row.implementation == name:
                size = _size(row, over)
                shown[size] = _cost(row, cost)
        sizes_and_costs = curve(rows, over, name, cost)
        fitted = exponent(*sizes_and_costs)
        table.add_row(name, *shown.values(), _number(fitted, "{:.2f}"))
    empty = [""] * len(sizes)
    textbook = Text(TEXTBOOK[over, cost], style="dim")
    table.add_row(Text("textbook", style="dim"), *empty, textbook)
    return table


def _size(row: Measurement, over: str) -> int:
    return row.work.t if over == "tokens" else row.work.n


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
