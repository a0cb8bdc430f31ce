"""The pictures of a page: plotly figures that follow its colours.

Needs plotly.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from flax_attn.parity.report.scale import COLORS, FLOOR

if TYPE_CHECKING:
    from flax_attn.parity.trace.difference import Difference

# The operations that are named on the axis, the first of those that are wrong.
LABELS = 12
# The most that is drawn of a layer and of a curve, to keep the page small.
HEADS, TOKENS, POINTS = 8, 32, 500
FLAX, TORCH = "#e8710a", "#1a73e8"


@dataclass(frozen=True)
class Picture:
    """A figure, with its content in words for readers who cannot see it.

    Args:
        title: title above the picture.
        words: text below the picture, also for screen readers.
        data: the figure, as plotly's JSON.
        height: height in pixels.
    """

    title: str
    words: str
    data: str
    height: int


def difference(found: Difference) -> Picture:
    """Draw the error of every operation that both sides have, in order of execution."""
    names = [_text(step.name) for step in found.steps]
    errors = [step.error for step in found.steps]
    figure = go.Figure(
        go.Heatmap(
            z=_logarithm([errors]),
            y=["error"],
            text=[[f"{error:.1e}" for error in errors]],
            customdata=[names],
            hovertemplate="%{customdata}<br>%{text}<extra></extra>",
            xgap=1,
            hoverongaps=False,
            **_error_scale(),
        )
    )
    lines = {place for one in found.hypotheses for place in one.flax.places[:1]}
    marks = [i for i, step in enumerate(found.steps) if step.place in lines and step.differs]
    labels = [names[i] for i in marks[:LABELS]]
    figure.update_yaxes(showgrid=False, zeroline=False)
    figure.update_xaxes(tickvals=marks[:LABELS], ticktext=labels, tickangle=-30, showgrid=False)
    differ = sum(step.differs for step in found.steps)
    words = (
        f"{len(names)} operations in order of execution, from left to right; the value of {differ}"
        f" differs."
    )
    margin = {"t": 12, "b": 50, "l": 70, "r": 12}
    return _picture(figure, "Errors of every operation", words, 150, margin)


def attention(name: str, flax: np.ndarray, torch: np.ndarray) -> list[Picture]:
    """Draw the weights `(b, n, t, s)` of both sides and their difference.

    There is one picture for each head of the first example.
    """
    heads = [side[0, :HEADS, :TOKENS, :TOKENS] for side in (flax, torch)]
    return [_head(f"{name}, head {i}", *head) for i, head in enumerate(zip(*heads, strict=True))]


def losses(flax: np.ndarray, torch: np.ndarray, rule: float) -> Picture:
    """Draw the losses of both sides, and below it how far apart they are."""
    apart = np.abs(flax - torch) / np.max(np.abs(torch))
    steps = len(torch)
    figure = make_subplots(2, 1, shared_xaxes=True, row_heights=[0.6, 0.4], vertical_spacing=0.08)
    _add_curves(figure, flax, torch)
    _add_difference(figure, apart, rule)
    figure.update_yaxes(type="log", exponentformat="power")
    figure.update_yaxes(title="loss", row=1)
    figure.update_yaxes(title="difference", range=np.log10([FLOOR / 2, 1]), dtick=6, row=2)
    figure.update_xaxes(title="step", row=2)
    figure.update_xaxes(range=[0, steps + 1])
    figure.update_layout(legend={"orientation": "h", "y": 1.12})
    ours = f"flax from {flax[0]:.4g} to {flax[-1]:.4g}"
    theirs = f"torch from {torch[0]:.4g} to {torch[-1]:.4g}"
    words = (
        f"{steps} steps: {theirs}, {ours}; at most {np.max(apart):.1e} of the largest loss apart."
        f" The rule is {rule:.0e}."
    )
    margin = {"t": 12, "b": 40, "l": 80, "r": 12}
    return _picture(figure, "Losses", words, 360, margin)


def _drawn_steps(count: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, POINTS).astype(int))


def _add_curves(figure: go.Figure, flax: np.ndarray, torch: np.ndarray) -> None:
    steps = _drawn_steps(len(torch))
    curve = {"x": steps + 1, "mode": "lines"}
    # The curve of torch is wide and pale, so that the other is seen on it.
    below = {"color": TORCH, "width": 5}
    above = {"color": FLAX, "width": 2, "dash": "dash"}
    figure.add_scatter(y=torch[steps], name="torch", line=below, opacity=0.55, **curve)
    figure.add_scatter(y=flax[steps], name="flax", line=above, **curve)


def _add_difference(figure: go.Figure, apart: np.ndarray, rule: float) -> None:
    steps = _drawn_steps(len(apart))
    place = {"row": 2, "col": 1}
    figure.add_scatter(
        x=steps + 1,
        y=np.maximum(apart[steps], FLOOR),
        mode="markers",
        name="difference",
        marker={"color": "#7f7f7f", "size": 4},
        **place,
    )
    ends = {"x": [0, len(apart) + 1], "y": [rule, rule]}
    dotted = {"color": FLAX, "dash": "dot"}
    figure.add_scatter(mode="lines", name="rule", line=dotted, **ends, **place)


def _head(title: str, flax: np.ndarray, torch: np.ndarray) -> Picture:
    apart = np.abs(flax - torch)
    query, key = np.unravel_index(np.argmax(apart), apart.shape)
    figure = make_subplots(
        1, 3, subplot_titles=["flax", "torch", "difference"], horizontal_spacing=0.04
    )
    weights = {
        "coloraxis": "coloraxis",
        "hovertemplate": "query %{y}, key %{x}<br>%{z:.6g}<extra></extra>",
    }
    hover = "query %{y}, key %{x}<br>10^%{z:.1f}<extra></extra>"
    # Both sides have one scale of colours, the difference has that of errors.
    figure.add_heatmap(z=np.float32(flax), row=1, col=1, **weights)
    figure.add_heatmap(z=np.float32(torch), row=1, col=2, **weights)
    figure.add_heatmap(z=_logarithm(apart), hovertemplate=hover, row=1, col=3, **_error_scale())
    figure.update_yaxes(autorange="reversed", showticklabels=False)
    figure.update_xaxes(showticklabels=False)
    figure.update_layout(coloraxis={"colorscale": "Viridis", "cmin": 0.0, "showscale": False})
    words = f"Largest difference {apart.max():.1e}, at query {query}, key {key}."
    return _picture(figure, title, words, 150, {"t": 24, "b": 4, "l": 4, "r": 4})


def _error_scale() -> dict[str, Any]:
    return {"colorscale": COLORS, "zmin": np.log10(FLOOR), "zmax": 0.0, "showscale": False}


def _logarithm(errors: Any) -> np.ndarray:
    # In float32, and what is infinite as the largest that is finite: JSON has no infinity.
    return np.log10(np.clip(np.asarray(errors, np.float64), FLOOR, 1e30)).astype(np.float32)


def _picture(
    figure: go.Figure, title: str, words: str, height: int, margin: dict[str, int]
) -> Picture:
    # Through it the page's own background is seen.
    clear = "rgba(0,0,0,0)"
    figure.update_layout(
        template="none", paper_bgcolor=clear, plot_bgcolor=clear, height=height, margin=margin
    )
    # plotly writes `<` as an escape, so that no name can end the script that holds it.
    data = str(figure.to_json())
    return Picture(title, words, data, height)


def _text(name: str) -> str:
    """Return a name as plotly takes it: it reads `<b>` and `&lt;` in a text as HTML."""
    return html.escape(name, quote=False)
