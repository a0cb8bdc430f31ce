"""Tables of rotary angles, in plain NumPy: fit the base, the order of columns, the position."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

Forms = Iterator[tuple[str, np.ndarray]]
FUNCTIONS = {"cos": np.cos, "sin": np.sin}
COLUMNS = {  # the pair that a column belongs to, of so many columns
    "halves": lambda columns: np.tile(np.arange(columns // 2), 2),
    "neighbours": lambda columns: np.repeat(np.arange(columns // 2), 2),
    "one column a pair": np.arange,
}
STARTS = (0, 1, 2)  # positions of the first row that are tried


def angle_tables(value: np.ndarray) -> Forms:
    """Yield tables of cosines or sines of `position * base^(-2 i / h)`, one row for each position.

    Their shape is `(t, h)`, or that with axes of size 1.
    """
    t, columns = max(value.shape[:-1], default=0), value.shape[-1] if value.ndim else 0
    if t < 3 or columns < 4 or columns % 2 or value.size != t * columns:
        return
    table = value.reshape(t, columns)
    for layout, (name, function), start in product(COLUMNS, FUNCTIONS.items(), STARTS):
        pairs = COLUMNS[layout](columns)
        exponents = pairs / (pairs.max() + 1)
        base = _base(table[:, list(pairs).index(1)], exponents[list(pairs).index(1)])
        if base is not None:
            form = function((start + np.arange(t))[:, None] * base**-exponents)
            yield (
                f"{name} of rotary angles of base {base:g}, {layout}, from position {start}",
                form.reshape(value.shape),
            )


def _base(column: np.ndarray, exponent: float) -> float | None:
    """Return the base of a column, to six digits.

    Cosines and sines satisfy `x[i + 1] + x[i - 1] = 2 cos(frequency) x[i]`.
    """
    middle = column[1:-1]
    cosine = (
        float((column[2:] + column[:-2]) @ middle / (2 * (middle @ middle)))
        if middle.any()
        else 1.0
    )
    if not -1 < cosine < 1:
        return None
    return float(f"{np.arccos(cosine) ** (-1 / exponent):.6g}")
