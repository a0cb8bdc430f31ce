"""Attention weights as pictures. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_attention(
    weights: Any,
    tokens: Sequence[str],
    key_tokens: Sequence[str] | None = None,
    *,
    titles: Sequence[str] | None = None,
    title: str = "",
    columns: int = 4,
) -> Figure:
    """Draw the heads of one layer as labelled heat maps on one colour scale.

    Rows are queries, columns are keys.

    Args:
        weights: weights of one example, not of a batch: `(n, t, s)`, or `(t, s)` for one head.
        tokens: labels of the queries, t in all.
        key_tokens: labels of the keys, s in all; None is the same as `tokens`.
        titles: title of each head; None is "head 0", "head 1" and so on.
        title: title of the figure.
        columns: greatest number of heads side by side.

    Returns:
        A matplotlib figure; write it with `figure.savefig("maps.png")`.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if the shapes of weights, tokens and titles differ.

    Example:
        >>> figure = plot_attention(np.full((2, 3, 3), 1 / 3), ["one", "small", "step"])
        >>> [axes.get_title() for axes in figure.axes[:2]]
        ['head 0', 'head 1']
    """
    Figure = _figure_class()
    weights = np.asarray(weights, dtype=np.float64)
    weights = weights[None] if weights.ndim == 2 else weights
    key_tokens = tokens if key_tokens is None else key_tokens
    titles = [f"head {i}" for i in range(len(weights))] if titles is None else titles
    _check(weights, tokens, key_tokens, titles)

    n, t, s = weights.shape
    across = min(n, columns)
    down = -(-n // across)
    # A cell is large enough for its number; a long text has small cells without numbers.
    cell = 0.55 if max(t, s) <= 12 else max(0.16, 6 / max(t, s))
    width, height = across * (s * cell + 1.2) + 0.8, down * (t * cell + 1.4) + 0.4
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = np.ravel(figure.subplots(down, across, squeeze=False))
    # One scale for all heads; it has some length where all weights are 0.
    top = max(float(np.nanmax(weights, initial=0.0)), np.finfo(float).tiny)
    image = None
    for panel, head, name in zip(panels, weights, titles, strict=False):
        image = _draw_head(panel, head, name, tokens, key_tokens, top)
    for panel in panels[n:]:
        panel.set_axis_off()
    figure.supxlabel("key: attended to")
    figure.supylabel("query: attending")
    figure.colorbar(image, ax=list(panels), label="weight", shrink=0.8)
    figure.suptitle(title)
    return figure


def _draw_head(
    panel: Any,
    head: np.ndarray,
    name: str,
    tokens: Sequence[str],
    key_tokens: Sequence[str],
    top: float,
) -> Any:
    image = panel.imshow(head, cmap="viridis", vmin=0.0, vmax=top)
    panel.set_title(name)
    # Tokens may hold dollar signs, which would begin a formula.
    labels = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
    panel.set_xticks(range(len(key_tokens)), key_tokens, parse_math=False, **labels)
    panel.set_yticks(range(len(tokens)), tokens, parse_math=False)
    if max(head.shape) <= 12:
        _write_numbers(panel, head, top)
    return image


def _write_numbers(panel: Any, head: np.ndarray, top: float) -> None:
    for row, column in np.argwhere(head):  # a weight of exactly zero is masked, and stays blank
        weight = head[row, column]
        colour = "black" if weight > 0.6 * top else "white"
        panel.text(column, row, f"{weight:.2f}", ha="center", va="center", color=colour, fontsize=8)


def _check(
    weights: np.ndarray, tokens: Sequence[str], key_tokens: Sequence[str], titles: Sequence[str]
) -> None:
    if weights.ndim != 3:
        raise ValueError(
            f"weights must be (n, t, s) or (t, s), of one example; got shape {weights.shape}. "
            "Of a batch pass weights[0]"
        )
    sizes = (len(titles), len(tokens), len(key_tokens))
    if weights.shape != sizes:
        raise ValueError(
            f"weights (n, t, s) = {weights.shape} need as many titles, tokens and key_tokens; got"
            f" {sizes}. For cross attention pass key_tokens"
        )


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot_attention needs matplotlib: pip install matplotlib") from error
    return Figure
