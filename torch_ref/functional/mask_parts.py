"""The conditions that masks are made of, decided from the indices of queries and keys alone.

`True` means attend, everywhere. Query `i` stands at position `offset + i`, key `j` at position `j`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Integer
from torch import Tensor

from attn_spec.attention_checks import check_broadcast, check_offset
from torch_ref.functional.mask_part import Count, Part
from torch_ref.functional.shapes import Index

_UNBOUNDED = 2**61  # beyond every index; sums of a few of these still fit int64
_INT64 = torch.iinfo(torch.int64)


@dataclass(frozen=True)
class Positioned(Part):
    """A part in which query `i` stands at `offset + i`."""

    offset: Count | None = field(default=None, kw_only=True)

    def resolve(self, b, n, t, s):
        if self.offset is None and t != s:
            raise ValueError(
                "a causal, window or prefix mask needs an offset when t != s: query i stands at"
                f" offset + i; got t={t}, s={s}. Choose offset=0 (top-left, as torch's is_causal)"
                f" or offset={s - t} (bottom-right, as FlashAttention): build a module with"
                " causal=False and pass mask=Mask.causal(offset=...)"
            )
        self.check_static(t, s)
        _check_rows("offset", self.offset, b)
        return self if self.offset is not None else dataclasses.replace(self, offset=0)

    def check_static(self, t: int, s: int, left: int = 0, right: int = 0) -> None:
        """Raise if an offset that is known is one for which all queries see the same keys."""
        if isinstance(self.offset, int):
            check_offset(self.offset, t, s, left, right)

    def beside(self, rows: Index, distance: int) -> Tensor:
        """Return the index of the key at a distance from the position of each query.

        An index far beyond all keys is clipped, and stays beyond them.
        """
        return rows + _per_row(0 if self.offset is None else self.offset, rows, distance)


@dataclass(frozen=True)
class Causal(Positioned):
    """Key `j` is seen from position `p` when `j <= p`."""

    def allow(self, rows, cols):
        return cols <= self.beside(rows, 0)


@dataclass(frozen=True)
class Window(Positioned):
    """Key `j` is seen from position `p` when `p - left <= j <= p + right`; None is unbounded."""

    left: int | None
    right: int | None

    def check_static(self, t, s):
        super().check_static(t, s, self.left or 0, self.right or 0)

    def allow(self, rows, cols):
        inside = torch.ones_like(cols, dtype=torch.bool)
        if self.left is not None:
            inside = inside & (cols >= self.beside(rows, -self.left))
        if self.right is not None:
            inside = inside & (cols <= self.beside(rows, self.right))
        return inside


@dataclass(frozen=True)
class Prefix(Positioned):
    """Key `j` is seen from position `p` when `j <= p` or `j < length`."""

    length: Count

    def resolve(self, b, n, t, s):
        _check_rows("length", self.length, b)
        return super().resolve(b, n, t, s)

    def allow(self, rows, cols):
        return (cols <= self.beside(rows, 0)) | (cols < _per_row(self.length, rows))


@dataclass(frozen=True)
class Lengths(Part):
    """Query `i` sees key `j` when `i < query` and `j < key`; None is unbounded."""

    query: Count | None = None
    key: Count | None = None

    def resolve(self, b, n, t, s):
        _check_rows("query lengths", self.query, b)
        _check_rows("key lengths", self.key, b)
        return self

    def allow(self, rows, cols):
        inside = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=rows.device)
        if self.query is not None:
            inside = inside & (rows < _per_row(self.query, rows))
        if self.key is not None:
            inside = inside & (cols < _per_row(self.key, rows))
        return inside


@dataclass(frozen=True)
class Segments(Part):
    """Query `i` sees key `j` when their segment ids are equal."""

    query: Integer[Tensor, "*b t"]
    key: Integer[Tensor, "*b s"]

    def resolve(self, b, n, t, s):
        for name, ids, size in (("query", self.query, t), ("key", self.key, s)):
            shape = tuple(ids.shape)
            if shape not in ((size,), (1, size), (b, size)):
                raise ValueError(
                    f"{name} segments must have one id a token, shape ({b}, {size}) or ({size},);"
                    f" got {shape}. When t != s pass both: Mask.segments(query, key)"
                )
        return self

    def allow(self, rows, cols):
        query = _take(torch.atleast_2d(self.query).to(rows.device), rows, 1)
        key = _take(torch.atleast_2d(self.key).to(rows.device), cols, 1)
        return query[:, None, :, None] == key[:, None, None, :]

    def check_whole(self, s):
        _check_whole("segments", self.query.shape[-1:], s)
        _check_whole("key segments", self.key.shape[-1:], s)


@dataclass(frozen=True)
class Dense(Part):
    """Any boolean array that broadcasts to `(b, n, t, s)`."""

    array: Bool[Tensor, ...]

    def resolve(self, b, n, t, s):
        check_broadcast("mask", tuple(self.array.shape), (b, n, t, s))
        return self

    def allow(self, rows, cols):
        array = _of_rank_4(self.array).to(rows.device)
        array = array if array.shape[2] == 1 else _take(array, rows, 2)
        return array if array.shape[3] == 1 else _take(array, cols, 3)

    def check_whole(self, s):
        _check_whole("mask", [size for size in self.array.shape[-2:] if size != 1], s)


def _check_rows(name: str, values: Count | None, b: int) -> None:
    shape = tuple(getattr(values, "shape", ()))
    if shape not in ((), (1,), (b,)):
        raise ValueError(
            f"{name} must be one integer or one a row, shape ({b},); got shape {shape}"
        )


def _check_whole(name: str, sizes: Sequence[int], s: int) -> None:
    if any(size != s for size in sizes):
        raise ValueError(
            "under a cache the mask is that of the whole sequence, with one row and one column for"
            f" each of the capacity={s} tokens it can hold; got {name} of"
            f" {', '.join(map(str, sizes))} tokens. Pad it to the capacity: what stands beyond the"
            " tokens is hidden"
        )


def _of_rank_4(array: Tensor) -> Tensor:
    return array.reshape((1,) * (4 - array.ndim) + tuple(array.shape))


def _take(array: Tensor, index: Index, axis: int) -> Tensor:
    # An index beyond the last, of a token that is padding or does not fit, reads the last, as in
    # JAX.
    size = array.shape[axis]
    return array.index_select(axis, index.reshape(-1).clamp(max=size - 1) % size)


def _per_row(values: Count, rows: Index, more: int = 0) -> Tensor:
    return torch.as_tensor(_bounded(values, more), device=rows.device).reshape(-1, 1, 1, 1)


def _bounded(values: Count, more: int) -> Count:
    # The sum within the ends, clipped before they are added.
    if isinstance(values, int):
        return max(-_UNBOUNDED, min(values + more, _UNBOUNDED))
    ends = (max(_INT64.min, min(end - more, _INT64.max)) for end in (-_UNBOUNDED, _UNBOUNDED))
    low, high = ends  # the values whose sum is within
    return values.clamp(low, high) - low + _bounded(low, more)
