"""Formulas for the tokens of an image, in plain NumPy: patches, order, class token, positions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product

import numpy as np
from einops import rearrange

from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.trace.resizing import RESIZES

Forms = Iterator[tuple[str, np.ndarray]]
PATCHES = {"row by row": "(i j)", "column by column": "(j i)"}
PIXELS = {"c": "channel", "p": "row", "q": "column"}
LAYOUTS = ("b c (i p) (j q)", "b (i p) (j q) c")  # of an image
GRIDS = ("b d i j", "b i j d")  # of what a convolution makes of it


def patches(value: np.ndarray, sources: Arrays) -> Forms:
    """The patches of an image, their pixels side by side: the order of PyTorch's `unfold` first."""
    if value.ndim != 3:
        return
    for name, image in sources.items():
        for layout, channel in zip(LAYOUTS, (1, -1), strict=True) if image.ndim == 4 else ():
            sizes = [n for i, n in enumerate(image.shape) if i not in (0, channel % 4)]
            for p, q in _patch_sizes(value.shape, sizes, image.shape[channel]):
                for (where, tokens), order in (
                    (x, y) for y in permutations("cpq") for x in PATCHES.items()
                ):
                    pixels = ", ".join(PIXELS[axis] for axis in order)
                    form = rearrange(image, f"{layout} -> b {tokens} ({' '.join(order)})", p=p, q=q)
                    yield f"patches of {name} {where}, each by {pixels}", form


def _patch_sizes(
    shape: tuple[int, ...], sizes: list[int], channels: int
) -> Iterator[tuple[int, int]]:
    rows, columns = sizes
    for p in (p for p in range(1, rows + 1) if rows % p == 0):
        q, rest = divmod(shape[-1], channels * p)
        if not rest and q and columns % q == 0 and (rows // p) * (columns // q) == shape[1]:
            yield p, q


def tokens(value: np.ndarray, sources: Arrays, own: Arrays) -> Forms:
    """Patches in a row, with a class token or without, and with positions of the module's own."""
    if value.ndim != 3:
        return
    width, own = value.shape[-1], {name.rpartition(".")[2]: w for name, w in own.items()}
    classes = {name: w.ravel() for name, w in own.items() if w.size == width}
    tables = {
        name: w.reshape(-1, width)
        for name, w in own.items()
        if w.ndim > 1 and w.shape[-1] == width < w.size
    }
    for text, grid, row in _rows(value, sources):
        for with_class, first, whole in _with_class(text, row, classes, value.shape[1]):
            yield with_class, whole
            for name, x in sources.items():  # of a layer of positions
                if x.shape in (whole.shape, whole.shape[1:], (1, *whole.shape[1:])):
                    yield f"{with_class} + {name}", whole + x
            for name, table in tables.items():
                yield from _placed(f"{with_class} + {name}", value, whole, table)
                yield from _resized(f"{with_class} + {name}", whole, table, grid, first)


def _rows(value: np.ndarray, sources: Arrays) -> Iterator[tuple[str, tuple[int, int], np.ndarray]]:
    """Yield what may stand in a row, with the sizes of its grid: 0 where it comes as a row."""
    b, n, d = value.shape
    for name, x in sources.items():
        if x.ndim == 3 and x.shape[0] == b and x.shape[-1] == d and x.shape[1] in (n, n - 1):
            yield name, (0, 0), x
        for grid, channel in (
            zip(GRIDS, (1, -1), strict=True) if x.ndim == 4 and len(x) == b else ()
        ):
            if x.shape[channel] == d and x.size // (b * d) in (n, n - 1):
                i, j = (size for axis, size in enumerate(x.shape) if axis not in (0, channel % 4))
                for where, order in PATCHES.items():
                    yield f"{name} {where}", (i, j), rearrange(x, f"{grid} -> b {order} d")


def _with_class(
    text: str, row: np.ndarray, classes: Arrays, n: int
) -> Iterator[tuple[str, bool | None, np.ndarray]]:
    """Yield rows of the right length, and whether a class token comes first; None without one."""
    if row.shape[1] == n:
        yield text, None, row
        return
    for name, vector in classes.items():
        token = np.broadcast_to(vector, (len(row), 1, len(vector)))
        yield f"{name}, then {text}", True, np.concatenate([token, row], 1)
        yield f"{text}, then {name}", False, np.concatenate([row, token], 1)


def _placed(text: str, value: np.ndarray, whole: np.ndarray, table: np.ndarray) -> Forms:
    n = whole.shape[1]
    if len(table) < n:
        return
    first = int(np.abs(table[: len(table) - n + 1] - (value - whole)[0, 0]).max(-1).argmin())
    yield text + (f" from row {first} on" if first else ""), whole + table[None, first : first + n]


def _resized(
    text: str, whole: np.ndarray, table: np.ndarray, grid: tuple[int, int], first: bool | None
) -> Forms:
    # The table is of a square image; a class token has a position of its own before it.
    extra = 0 if first is None else 1
    side = round((len(table) - extra) ** 0.5)
    if first is False or side**2 != len(table) - extra:
        return
    square = table[extra:].reshape(side, side, -1)
    grids = [grid] if grid[0] else _grids(whole.shape[1] - extra)
    for (i, j), (how, resize) in product(grids, RESIZES.items()):
        resized = np.einsum("ia,jb,abd->ijd", resize(side, i), resize(side, j), square).reshape(
            i * j, -1
        )
        yield f"{text} resized, {how}", whole + np.concatenate([table[:extra], resized])[None]


def _grids(count: int) -> list[tuple[int, int]]:
    """Return the sizes of grids of so many patches, the squarest first."""
    found = [(i, count // i) for i in range(1, count + 1) if count % i == 0]
    return sorted(found, key=lambda grid: max(grid))
