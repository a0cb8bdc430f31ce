"""Draw a matrix, several matrices side by side, or bars as SVG for light and dark pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

import numpy as np

# In pixels: a cell, the gap between panels, and an axis and a letter of its name.
CELL, GAP, MARGIN, LETTER = 13, 14, 16, 6
ACROSS = 2  # panels
LEVELS = 8  # shades: a number that is not 0 has at least the faintest


def svg(numbers: np.ndarray, axes: tuple[str, str], label: str) -> str:
    """Return a picture as an `svg` element.

    Args:
        numbers: `(rows, columns)`, or `(panels, rows, columns)`, or the heights of bars.
        axes: names of the rows and columns.
        label: id of the element that describes the picture.

    Raises:
        ValueError: if the numbers have another rank or are not finite.
    """
    if numbers.ndim not in (1, 2, 3) or not np.isfinite(numbers).all():
        raise ValueError(
            f"a picture has finite numbers and 1, 2 or 3 axes; got shape {numbers.shape}. Change"
            " the card"
        )
    *sizes, parts = (
        _bars(numbers) if numbers.ndim == 1 else _panels(numbers.reshape(-1, *numbers.shape[-2:]))
    )
    height, width = (max(size, LETTER * len(name)) for size, name in zip(sizes, axes, strict=True))
    names = (
        f'<text x="{MARGIN + width / 2:g}" y="{height + MARGIN - 3}">{escape(axes[1])}</text><text'
        f' transform="translate({MARGIN - 5} {height / 2:g}) rotate(-90)">{escape(axes[0])}</text>'
    )
    size = f'width="{width + MARGIN + 1}" height="{height + MARGIN}"'
    box = f'viewBox="0 0 {width + MARGIN + 1} {height + MARGIN}"'
    drawn = "".join(parts)
    return f'<svg role="img" aria-labelledby="{label}" {size} {box}>{drawn}{names}</svg>'


def _panels(numbers: np.ndarray) -> tuple[int, int, Iterable[str]]:
    """Return height, width and elements of matrices."""
    count, rows, columns = numbers.shape
    right, down = columns * CELL + GAP, rows * CELL + GAP
    top = np.abs(numbers).max() or 1.0
    panels = (
        _panel(panel / top, MARGIN + i % ACROSS * right, i // ACROSS * down)
        for i, panel in enumerate(numbers)
    )
    return -(-count // ACROSS) * down - GAP, min(count, ACROSS) * right - GAP, panels


def _panel(shares: np.ndarray, x: int, y: int) -> str:
    rows, columns = shares.shape
    lines = "".join(f"M0 {i}h{columns}" for i in range(rows + 1)) + "".join(
        f"M{j} 0v{rows}" for j in range(columns + 1)
    )
    cells = "".join(_shades(shares))
    return (
        f'<g transform="translate({x} {y + 0.5}) scale({CELL})">{cells}<path class="grid"'
        f' d="{lines}"/></g>'
    )


def _shades(shares: np.ndarray) -> Iterator[str]:
    """One path for each sign and shade."""
    levels = np.ceil(np.abs(shares) * LEVELS).astype(int)
    for name, signed in (("more", shares > 0), ("less", shares < 0)):
        for level in range(1, LEVELS + 1):
            squares = "".join(
                f"M{j} {i}h1v1h-1z" for i, j in np.argwhere(signed & (levels == level))
            )
            if squares:
                yield f'<path class="{name}" opacity="{level / LEVELS:g}" d="{squares}"/>'


def _bars(heights: np.ndarray) -> tuple[int, int, Iterable[str]]:
    """Return height, width and elements of bars."""
    size, wide = 9 * CELL, 2 * CELL
    top = heights.max()
    bars = (
        f'<rect class="more" x="{MARGIN + i * wide + 3}" y="{size - share:g}" width="{wide - 6}"'
        f' height="{share:g}"/><text x="{MARGIN + i * wide + CELL}"'
        f' y="{size - share - 3:g}">{value:.3g}</text>'
        for i, (value, share) in enumerate(zip(heights, heights / top * (size - 14), strict=True))
    )
    base = f'<path class="grid" d="M{MARGIN} {size}h{wide * len(heights)}"/>'
    return size, wide * len(heights), [*bars, base]
