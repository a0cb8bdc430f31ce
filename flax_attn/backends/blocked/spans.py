"""The division of a call into tiles of all keys that their queries may see, for accelerators.

A GPU or TPU pays for each kernel that it launches, so tiles are few and large: as many heads and
queries at once as a budget of scores allows. Which keys a tile has is known before tracing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flax_attn.backends.call import Call
from flax_attn.functional.mask_part import MaskPart

UNIT = 128  # tokens: what tensor cores and matrix units take at once
_GROUPS = 8  # of loops: more follow the mask more closely
_SHARES = 16  # of the queries: finer tiles along the edge of a mask save little


class Span(NamedTuple):
    """`count` tiles of `rows` queries from `row` on, against `cols` keys from `col` on."""

    row: int
    rows: int
    count: int
    col: int
    cols: int


@dataclass(frozen=True)
class Division:
    """What is computed at once.

    Args:
        batch: number of batch rows.
        heads: number of key/value heads.
        spans: tiles of each part, in the order of the queries.
        head_parts: number of parts of one batch row.
        parts: number of parts.
    """

    batch: int
    heads: int
    spans: tuple[Span, ...]
    head_parts: int
    parts: int

    @property
    def largest(self) -> int:
        """Number of scores of the largest tile of one query head."""
        return max(span.rows * span.cols for span in self.spans)


def divided(call: Call, most: int, unrolled: int) -> Division:
    """Return tiles of about `most` scores at most, over as many heads as that allows.

    More than `unrolled` tiles are looped over, so that programs stay small.
    """
    b, n, t, s = call.shape
    k = call.key.shape[2]
    # In an exported program the batch may be a symbol, and is then taken whole.
    known = b if isinstance(b, int) else 1
    least = min(t, UNIT) * s * (n // k)
    heads = _divisor(k, most // least)
    batch = _divisor(known, most // (least * k)) if heads == k else 1
    spans = tuple(_spans(call, most // (batch * heads * (n // k)), unrolled))
    parts = known // batch * (k // heads)
    return Division(batch if isinstance(b, int) else b, heads, spans, k // heads, parts)


def _divisor(size: int, most: int) -> int:
    # The largest divisor that is at most `most`, and at least 1.
    return next(x for x in range(size, 0, -1) if size % x == 0 and x <= max(most, 1))


def _spans(call: Call, most: int, unrolled: int) -> Iterator[Span]:
    _, _, t, _ = call.shape
    keys = _SeenKeys.of(call)
    spans = list(_greedy(keys, 0, t, most, -(-t // _SHARES)))
    if len(spans) <= unrolled:
        yield from spans
        return
    group = _round_up(-(-t // _GROUPS), UNIT)
    for first in range(0, t, group):
        yield from _equal(keys, first, min(first + group, t), most)


def _greedy(keys: _SeenKeys, first: int, stop: int, most: int, share: int) -> Iterator[Span]:
    while first < stop:
        large = _fitting(keys, first, stop, most)
        # Small tiles compute less in vain along the edge of a mask; too small ones cost launches.
        small = max(_fitting(keys, first, stop, most // 4), _round_up(share, UNIT))
        rows = min(large, small, stop - first)
        yield _span(keys, first, rows, 1)
        first += rows


def _equal(keys: _SeenKeys, first: int, stop: int, most: int) -> Iterator[Span]:
    col, end = keys.range(first, stop)
    rows = _rows(end - col, most)
    count = (stop - first) // rows
    if count:
        yield Span(first, rows, count, col, end - col)
    rest = first + count * rows
    if rest < stop:
        yield _span(keys, rest, stop - rest, 1)


def _span(keys: _SeenKeys, row: int, rows: int, count: int) -> Span:
    col, end = keys.range(row, row + rows)
    return Span(row, rows, count, col, end - col)


def _fitting(keys: _SeenKeys, first: int, stop: int, most: int) -> int:
    # How many queries from `first` on see so few keys that their scores fit.
    rows = _rows(keys.s, most)
    while first + rows < stop:
        col, end = keys.range(first, first + rows + UNIT)
        if (rows + UNIT) * (end - col) > most:
            break
        rows += UNIT
    return rows


def _rows(cols: int, most: int) -> int:
    # Multiples of a unit, or few queries over very many keys.
    fits = most // max(cols, 1)
    return fits - fits % UNIT if fits >= UNIT else max(fits - fits % 8, 8)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class _SeenKeys(NamedTuple):
    # The parts of a mask that say before tracing which keys they show.
    parts: tuple[MaskPart, ...]
    s: int

    @staticmethod
    def of(call: Call) -> _SeenKeys:
        _, _, t, s = call.shape
        known = []
        for part in call.mask.parts:
            found = part.kv_range(0, t - 1, s)
            if isinstance(found.start, int) and isinstance(found.stop, int):
                known.append(part)
        return _SeenKeys(tuple(known), s)

    def range(self, first: int, stop: int) -> tuple[int, int]:
        """Return the keys that the queries from `first` to before `stop` may see; one at least."""
        start, end = 0, self.s
        for part in self.parts:
            found = part.kv_range(first, stop - 1, self.s)
            start, end = max(start, int(found.start)), min(end, int(found.stop))
        start = max(min(start, self.s - 1), 0)
        start -= start % UNIT
        end = max(end, start + 1)
        return start, min(_round_up(end, UNIT), self.s)
