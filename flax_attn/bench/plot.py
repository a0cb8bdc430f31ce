"""Plots of time and memory over the tokens. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flax_attn.bench.figures import MIB, curve, exponent, names
from flax_attn.bench.report import BenchmarkReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = (
    ("best", "time of forward+backward, ms", 1e3, 2),
    ("temporaries", "temporaries, MiB", 1 / MIB, 1),
)


def plot_growth(report: BenchmarkReport) -> Figure:
    """Draw time and memory of every implementation over the tokens.

    The axes are logarithmic, the exponents fitted. A curve that ends early ends where the next
    point was not timed; the table says why.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if the report has no growth, as with given shapes.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install matplotlib") from error
    shown = names(report.rows, "tokens")
    if not shown:
        raise ValueError(
            "a plot shows the growth over tokens, which this run did not measure. Leave out --shape"
        )
    figure = Figure(figsize=(12, 5), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, (cost, label, unit, textbook) in zip(panels, PANELS, strict=True):
        for i, name in enumerate(shown):
            _draw(panel, report, name, cost, unit, f"C{i}")
        # Both axes are logarithmic, so that a power is a line, and its exponent the slope.
        _textbook(panel, report, cost, unit, textbook)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:.0f}")
        panel.set(yscale="log", xlabel="T, tokens", ylabel=label)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    machine = report.machine
    figure.suptitle(f"{machine['processor']}, {machine['cores']} cores")
    return figure


def _draw(
    panel: Any, report: BenchmarkReport, name: str, cost: str, unit: float, color: str
) -> None:
    sizes, costs = curve(report.rows, "tokens", name, cost)
    fitted = exponent(sizes, costs) if sizes else None
    label = name if fitted is None else f"{name}: T^{fitted:.2f}"
    if sizes:
        scaled = unit * np.asarray(costs)
        panel.plot(sizes, scaled, marker="o", markersize=4, color=color, label=label)


def _textbook(panel: Any, report: BenchmarkReport, cost: str, unit: float, power: int) -> None:
    """Draw the textbook's slope through the last point of ours."""
    sizes, costs = curve(report.rows, "tokens", report.ours, cost)
    if sizes:
        line = unit * costs[-1] * (np.asarray(sizes) / sizes[-1]) ** power
        panel.plot(
            sizes, line, color="grey", linestyle="--", linewidth=1, label=f"textbook: T^{power}"
        )
