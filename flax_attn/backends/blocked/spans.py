"""The division of a call into tiles of all keys that their queries may see, for accelerators.

A GPU or TPU pays for each kernel that it launches, so tiles are few and large: as many heads and
queries at once as a budget of scores allows. Which keys a tile has is known before tracing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from flax_attn.backends.call import Call
from flax_attn.functional.kv_range import KVRange
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
        unrolled: whether tiles stand one after the other in the program, and not in loops.
    """

    batch: int
    heads: int
    spans: tuple[Span, ...]
    head_parts: int
    parts: int
    unrolled: bool = False

    @property
    def largest(self) -> int:
        """Number of scores of the largest tile of one query head."""
        return max(span.rows * span.cols for span in self.spans)


def divided(call: Call, most: int, unrolled: int) -> Division:
    """Return tiles of about `most` scores at most, over as many heads as that allows.

    More than `unrolled` tiles are looped over, so that programs stay small.
    """
    batch, heads, parts = _heads_at_once(call, most)
    k = call.key.shape[2]
    together = batch * heads * (call.query.shape[2] // k)
    spans = tuple(_greedy(_SeenKeys.of(call), 0, call.shape[2], most // together))
    few = len(spans) * parts <= unrolled
    return Division(
        # In an exported program the batch may be a symbol, and is then taken whole.
        batch=batch if isinstance(call.shape[0], int) else call.shape[0],
        heads=heads,
        spans=_joined(spans) if few else tuple(_in_groups(call, most // together)),
        head_parts=k // heads,
        parts=parts,
        unrolled=few,
    )


def _heads_at_once(call: Call, most: int) -> tuple[int, int, int]:
    # The rows of the batch and the key/value heads of a tile, and how many such parts there are.
    b, n, t, s = call.shape
    k, rows = call.key.shape[2], b if isinstance(b, int) else 1
    least = min(t, UNIT) * s * (n // k)
    heads = _divisor(k, most // least)
    batch = _divisor(rows, most // (least * k)) if heads == k else 1
    return batch, heads, rows // batch * (k // heads)


def _divisor(size: int, most: int) -> int:
    # The largest divisor that is at most `most`, and at least 1.
    return next(x for x in range(size, 0, -1) if size % x == 0 and x <= max(most, 1))


def _in_groups(call: Call, most: int) -> Iterator[Span]:
    _, _, t, _ = call.shape
    keys = _SeenKeys.of(call)
    group = _round_up(-(-t // _GROUPS), UNIT)
    for first in range(0, t, group):
        yield from _equal(keys, first, min(first + group, t), most)


def _greedy(keys: _SeenKeys, first: int, stop: int, most: int) -> Iterator[Span]:
    # Small tiles compute less in vain along the edge of a mask; too small ones cost launches.
    share = _round_up(-(-stop // _SHARES), UNIT)
    while first < stop:
        rows = min(share, stop - first)
        rows = _extended(keys, first, rows, stop, most)
        yield _span(keys, first, rows, 1)
        first += rows


def _extended(keys: _SeenKeys, first: int, rows: int, stop: int, most: int) -> int:
    # At most so many scores, but as many queries as see no more keys.
    rows = min(rows, _rows(keys.width(first, first + rows), most))
    width = keys.width(first, first + rows)
    largest = min(_rows(width, most), stop - first)
    while rows + UNIT <= largest and keys.width(first, first + rows + UNIT) == width:
        rows += UNIT
    return rows


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    # Tiles of equal sizes over the same keys as one span.
    equal = [list(group) for _, group in groupby(spans, key=lambda span: span[1:])]
    return tuple(group[0]._replace(count=len(group)) for group in equal)


def _equal(keys: _SeenKeys, first: int, stop: int, most: int) -> Iterator[Span]:
    size = stop - first
    rows = _rows(keys.width(first, stop), most)
    if rows <= size:
        yield _span(keys, first, size, 1)._replace(rows=rows, count=size // rows)
    if size % rows:
        yield _span(keys, stop - size % rows, size % rows, 1)


def _span(keys: _SeenKeys, row: int, rows: int, count: int) -> Span:
    col, end = keys.range(row, row + rows)
    return Span(row, rows, count, col, end - col)


def _rows(cols: int, most: int) -> int:
    # Multiples of a quarter of a unit, or few queries over very many keys.
    fits, quarter = most // max(cols, 1), UNIT // 4
    return fits - fits % quarter if fits >= quarter else max(fits - fits % 8, 8)


def _power_of_two(size: int, unit: int) -> int:
    return unit * 2 ** max(-(-size // unit) - 1, 0).bit_length()


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _is_known(found: KVRange) -> bool:
    return isinstance(found.start, int) and isinstance(found.stop, int)


class _SeenKeys(NamedTuple):
    # The parts of a mask that say before tracing which keys they show.
    parts: tuple[MaskPart, ...]
    s: int

    @staticmethod
    def of(call: Call) -> _SeenKeys:
        _, _, t, s = call.shape
        known = [part for part in call.mask.parts if _is_known(part.kv_range(0, t - 1, s))]
        return _SeenKeys(tuple(known), s)

    def range(self, first: int, stop: int) -> tuple[int, int]:
        """Return the keys that the queries from `first` to before `stop` may see; one at least."""
        start, end = self._exact(first, stop)
        start = max(min(start, self.s - 1), 0)
        start -= start % UNIT
        end = max(end, start + 1)
        # XLA computes the softmax of rows of a power of two in one kernel. In a window it would
        # double what is computed.
        width = _round_up(end - start, UNIT) if start else _power_of_two(end, UNIT)
        return start, min(start + width, self.s)

    def _exact(self, first: int, stop: int) -> tuple[int, int]:
        ranges = [part.kv_range(first, stop - 1, self.s) for part in self.parts]
        starts = [int(found.start) for found in ranges]
        stops = [int(found.stop) for found in ranges]
        return max([0, *starts]), min([self.s, *stops])

    def width(self, first: int, stop: int) -> int:
        """Return how many keys these are."""
        start, end = self.range(first, stop)
        return end - start
