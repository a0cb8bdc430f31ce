"""The conditions that masks are made of, decided from the indices of queries and keys alone.

`True` means attend, everywhere. Query `i` has position `offset + i`, key `j` has position `j`.
"""

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Integer
from torch import Tensor

from attn_spec.attention_checks import check_broadcast, check_offset
from attn_spec.mask_checks import check_offset_given, check_rows, check_segment_ids, check_whole
from torch_ref.functional.mask_part import Count, IntervalPart, MaskPart
from torch_ref.functional.shapes import Index

# Beyond every index; sums of a few of these still fit int64.
_UNBOUNDED = 2**61
_INT64 = torch.iinfo(torch.int64)


@dataclass(frozen=True)
class Positioned(MaskPart):
    """A part in which query `i` has position `offset + i`."""

    offset: Count | None = field(default=None, kw_only=True)

    def resolve(self, b, n, t, s):
        check_offset_given(self.offset, t, s)
        self.check_static(t, s)
        check_rows("offset", self.offset, b)
        placed = self if self.offset is not None else replace(self, offset=0)
        return super(Positioned, placed).resolve(b, n, t, s)

    @property
    def first_position(self) -> Count:
        """The position of query 0; an offset that is not given is 0."""
        return 0 if self.offset is None else self.offset

    def check_static(self, t: int, s: int, left: int = 0, right: int = 0) -> None:
        """Raise if an offset that is known is one for which all queries see the same keys."""
        if isinstance(self.offset, int):
            check_offset(self.offset, t, s, left, right)

    def position(self, i, distance=0):
        """Return the position of query `i` and a distance more.

        A position far beyond all keys is clipped, and stays beyond them.
        """
        return i + _per_row(self.first_position, i, distance)


@dataclass(frozen=True)
class Causal(Positioned, IntervalPart):
    """Key `j` is seen from position `p` when `j <= p`."""

    def interval(self, i):
        return 0, self.position(i)


@dataclass(frozen=True)
class Window(Positioned, IntervalPart):
    """Key `j` is seen from position `p` when `p - left <= j <= p + right`; None is unbounded."""

    left: int | None
    right: int | None

    def check_static(self, t, s):
        super().check_static(t, s, self.left or 0, self.right or 0)

    def interval(self, i):
        first = 0 if self.left is None else self.position(i, -self.left)
        last = _UNBOUNDED if self.right is None else self.position(i, self.right)
        return first, last


@dataclass(frozen=True)
class Prefix(Positioned, IntervalPart):
    """Key `j` is seen from position `p` when `j <= p` or `j < length`."""

    length: Count

    def interval(self, i):
        return 0, torch.maximum(self.position(i), _per_row(self.length, i, -1))


@dataclass(frozen=True)
class Lengths(IntervalPart):
    """Query `i` sees key `j` when `i < query` and `j < key`; None is unbounded."""

    query: Count | None = None
    key: Count | None = None

    def resolve(self, b, n, t, s):
        check_rows("query lengths", self.query, b)
        check_rows("key lengths", self.key, b)
        return self

    def interval(self, i):
        last = _UNBOUNDED if self.key is None else _per_row(self.key, i, -1)
        if self.query is None:
            return 0, last
        # A query of padding sees up to key -1, and so none.
        return 0, torch.where(i < _per_row(self.query, i), last, -1)


@dataclass(frozen=True)
class Segments(MaskPart):
    """Query `i` sees key `j` when their segment ids are equal."""

    query: Integer[Tensor, "*b t"]
    key: Integer[Tensor, "*b s"]

    def resolve(self, b, n, t, s):
        check_segment_ids("query", tuple(self.query.shape), b, t)
        check_segment_ids("key", tuple(self.key.shape), b, s)
        return self

    def allow(self, rows, cols):
        query = _take(torch.atleast_2d(self.query).to(rows.device), rows, 1)
        key = _take(torch.atleast_2d(self.key).to(rows.device), cols, 1)
        return query[:, None, :, None] == key[:, None, None, :]

    def check_whole(self, s):
        check_whole("segments", self.query.shape[-1:], s)
        check_whole("key segments", self.key.shape[-1:], s)


@dataclass(frozen=True)
class Dense(MaskPart):
    """Any boolean array that broadcasts to `(b, n, t, s)`."""

    array: Bool[Tensor, "..."]

    def resolve(self, b, n, t, s):
        check_broadcast("mask", tuple(self.array.shape), (b, n, t, s))
        return self

    def allow(self, rows, cols):
        array = _of_rank_4(self.array).to(rows.device)
        array = array if array.shape[2] == 1 else _take(array, rows, 2)
        return array if array.shape[3] == 1 else _take(array, cols, 3)

    def check_whole(self, s):
        check_whole("mask", [size for size in self.array.shape[-2:] if size != 1], s)


def _of_rank_4(array: Tensor) -> Tensor:
    return array.reshape((1,) * (4 - array.ndim) + tuple(array.shape))


def _take(array: Tensor, index: Index, axis: int) -> Tensor:
    # An index beyond the last, of a token that is padding or does not fit, reads the last, as in
    # JAX.
    size = array.shape[axis]
    return array.index_select(axis, index.reshape(-1).clamp(max=size - 1) % size)


def _per_row(values: Count, i: Tensor, more: int = 0) -> Tensor:
    return torch.as_tensor(_bounded(values, more), device=i.device).reshape(-1, 1, 1, 1)


def _bounded(values: Count, more: int) -> Count:
    if isinstance(values, int):
        return max(-_UNBOUNDED, min(values + more, _UNBOUNDED))
    # Values are clipped before they are added, to those whose sum is within: no sum wraps around.
    low = max(_INT64.min, min(-_UNBOUNDED - more, _INT64.max))
    high = max(_INT64.min, min(_UNBOUNDED - more, _INT64.max))
    return values.clamp(low, high) - low + _bounded(low, more)
