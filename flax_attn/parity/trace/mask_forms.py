"""Which scores a step of attention may hide, and by what, in plain NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flax_attn.parity.adapters.adapter import Arrays

Forms = Iterator[tuple[str, np.ndarray]]


def mask_forms(value: np.ndarray, other: np.ndarray, sources: Arrays) -> Forms:
    """Which scores are hidden, and by what."""
    visible, visible_there = np.isfinite(value), np.isfinite(other)
    kept = np.where(visible, value, 0)
    yield from _empty_rows(value, visible, visible_there)
    if "scores" in sources:
        yield from _filled(value, kept, visible_there, sources["scores"])
    text, band = _band(visible)
    yield text, np.where(band, kept, -np.inf)
    text = "a mask" if visible.sum() >= visible_there.sum() else "the same mask inverted"
    yield text, np.where(visible_there, -np.inf, kept)
    if "scores" in sources:
        yield (
            "a mask that is neither causal nor a window",
            np.where(visible, sources["scores"], -np.inf),
        )


def _empty_rows(value: np.ndarray, visible: np.ndarray, visible_there: np.ndarray) -> Forms:
    # Where one side sees nothing in a row, the other may have one number for all of it: its weights
    # are all the same.
    empty, empty_there = (~seen.any(-1, keepdims=True) for seen in (visible, visible_there))
    odd = empty != empty_there
    if not odd.any() or odd.all() or not np.array_equal(visible & ~odd, visible_there & ~odd):
        return
    if (odd & empty_there).any():
        row = value[np.broadcast_to(odd & empty_there, value.shape)]
        yield (
            f"{row[0]:g} throughout rows that see no key, which then attend to all alike",
            np.where(odd & empty_there, row[0], value),
        )
    else:
        yield "-inf throughout rows that see no key", value


def _band(visible: np.ndarray) -> tuple[str, np.ndarray]:
    """Return the smallest visible band `i - left <= j <= i + right`, in words and as `(t, s)`."""
    t, s = visible.shape[-2:]
    distance = np.arange(s) - np.arange(t)[:, None]
    seen = np.broadcast_to(distance, visible.shape)[visible]
    if not seen.size:
        return "a mask that hides everything", np.zeros((t, s), bool)
    left, right = int(-seen.min()), int(seen.max())
    if right >= s - 1 and left >= t - 1:
        text = "no mask"
    elif left >= t - 1:
        text = f"a causal mask, query i sees keys up to {_key(right)}"
    elif right >= s - 1:
        text = f"a mask of earlier keys, query i sees keys from {_key(-left)}"
    else:
        text = f"a sliding window, query i sees keys {_key(-left)} to {_key(right)}"
    return text, (-left <= distance) & (distance <= right)


def _key(distance: int) -> str:
    return f"i {'+' if distance > 0 else '-'} {abs(distance)}" if distance else "i"


def _filled(
    value: np.ndarray, kept: np.ndarray, visible_there: np.ndarray, scores: np.ndarray
) -> Forms:
    # Hidden by a number, and not by -inf: it still counts.
    filled, added = value[~visible_there], (value - scores)[~visible_there]
    if filled.size > 1 and np.isfinite(filled).all():
        fill, extra = float(np.median(filled)), float(np.median(added))
        yield (
            f"a mask that sets {fill:g} where the other side hides",
            np.where(visible_there, kept, fill),
        )
        if extra:
            text = f"a mask that adds {extra:g} where the other side hides"
            yield text, np.where(visible_there, kept, scores + extra)
