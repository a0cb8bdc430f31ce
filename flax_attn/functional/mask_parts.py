"""The conditions that masks are made of, decided from the indices of queries and keys alone.

`True` means attend, everywhere. Query `i` stands at position `offset + i`, key `j` at position `j`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Integer

from attn_spec.attention_checks import check_broadcast, check_offset
from flax_attn.functional.kv_range import (
    UNBOUNDED,
    KVRange,
    Limit,
    bounded,
    limits,
    maximum,
    plus,
    where,
)
from flax_attn.functional.mask_part import Count, Part, of_rank_4, pick
from flax_attn.functional.shapes import Index


@dataclass(frozen=True)
class Positioned(Part):
    """A part in which query `i` stands at `offset + i`."""

    offset: Count | None = field(default=None, kw_only=True)
    axes = {"offset": ("batch",)}

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

    def beside(self, rows: Index, distance: int) -> Array:
        """Return the index of the key at a distance from the position of each query.

        An index far beyond all keys is clipped, and stays beyond them.
        """
        return rows + _per_row(0 if self.offset is None else self.offset, distance)

    def ends(self, first: Limit, last: Limit, distance: int) -> tuple[Limit, Limit]:
        """Return the least and the greatest `beside` of the queries `first` to `last`."""
        least, greatest = limits(0 if self.offset is None else self.offset, distance)
        return first + least, last + greatest

    def row(self, b, n):
        return dataclasses.replace(self, offset=_count_of_row(self.offset, b))

    def shift(self, start, t, s):
        return dataclasses.replace(
            self, offset=plus(0 if self.offset is None else self.offset, start)
        )


@dataclass(frozen=True)
class Causal(Positioned):
    """Key `j` is seen from position `p` when `j <= p`."""

    def allow(self, rows, cols):
        return cols <= self.beside(rows, 0)

    def kv_range(self, first, last, s):
        least, greatest = self.ends(first, last, 0)
        return KVRange(0, greatest + 1, 0, least + 1)

    def band(self):
        return (None, self.offset or 0) if isinstance(self.offset, int | None) else None

    def interval(self, rows):
        return 0, self.beside(rows, 0) + 1


@dataclass(frozen=True)
class Window(Positioned):
    """Key `j` is seen from position `p` when `p - left <= j <= p + right`; None is unbounded."""

    left: int | None
    right: int | None

    def check_static(self, t, s):
        super().check_static(t, s, self.left or 0, self.right or 0)

    def allow(self, rows, cols):
        start, stop = self.interval(rows)
        return (cols >= start) & (cols < stop)

    def kv_range(self, first, last, s):
        start, inner_start = (0, 0) if self.left is None else self.ends(first, last, -self.left)
        inner_last, end = (
            (UNBOUNDED,) * 2 if self.right is None else self.ends(first, last, self.right)
        )
        return KVRange(start, end + 1, inner_start, inner_last + 1)

    def band(self):
        if not isinstance(self.offset, int | None):
            return None
        offset = self.offset or 0
        low = None if self.left is None else offset - self.left
        return low, None if self.right is None else offset + self.right

    def interval(self, rows):
        start = 0 if self.left is None else self.beside(rows, -self.left)
        return start, UNBOUNDED if self.right is None else self.beside(rows, self.right) + 1


@dataclass(frozen=True)
class Prefix(Positioned):
    """Key `j` is seen from position `p` when `j <= p` or `j < length`."""

    length: Count
    axes = {"offset": ("batch",), "length": ("batch",)}

    def resolve(self, b, n, t, s):
        _check_rows("length", self.length, b)
        return super().resolve(b, n, t, s)

    def allow(self, rows, cols):
        return cols < self.interval(rows)[1]

    def kv_range(self, first, last, s):
        (least, greatest), (shortest, longest) = self.ends(first, last, 0), limits(self.length)
        return KVRange(0, maximum(greatest + 1, longest), 0, maximum(least + 1, shortest))

    def interval(self, rows):
        return 0, jnp.maximum(self.beside(rows, 0) + 1, _per_row(self.length))

    def row(self, b, n):
        return Prefix(_count_of_row(self.length, b), offset=_count_of_row(self.offset, b))


@dataclass(frozen=True)
class Lengths(Part):
    """Query `i` sees key `j` when `i < query` and `j < key`; None is unbounded."""

    query: Count | None = None
    key: Count | None = None
    axes = {"query": ("batch",), "key": ("batch",)}

    def resolve(self, b, n, t, s):
        _check_rows("query lengths", self.query, b)
        _check_rows("key lengths", self.key, b)
        return self

    def allow(self, rows, cols):
        inside = jnp.ones((1, 1, 1, 1), bool)
        if self.query is not None:
            inside = inside & (rows < _per_row(self.query))
        if self.key is not None:
            inside = inside & (cols < _per_row(self.key))
        return inside

    def kv_range(self, first, last, s):
        query, key = (
            limits(UNBOUNDED if count is None else count) for count in (self.query, self.key)
        )
        return KVRange(0, where(first < query[1], key[1], 0), 0, where(last < query[0], key[0], 0))

    def interval(self, rows):
        stop = UNBOUNDED if self.key is None else _per_row(self.key)
        return 0, stop if self.query is None else jnp.where(rows < _per_row(self.query), stop, 0)

    def row(self, b, n):
        return Lengths(_count_of_row(self.query, b), _count_of_row(self.key, b))

    def shift(self, start, t, s):
        return Lengths(None if self.query is None else plus(self.query, -bounded(start)), self.key)


@dataclass(frozen=True)
class Segments(Part):
    """Query `i` sees key `j` when their segment ids are equal."""

    query: Integer[Array, "*b t"]
    key: Integer[Array, "*b s"]
    axes = {"query": ("batch", None), "key": ("batch", None)}

    def resolve(self, b, n, t, s):
        for name, ids, size in (("query", self.query, t), ("key", self.key, s)):
            shape = ids.shape
            if shape not in ((size,), (1, size), (b, size)):
                raise ValueError(
                    f"{name} segments must have one id a token, shape ({b}, {size}) or ({size},);"
                    f" got {shape}. When t != s pass both: Mask.segments(query, key)"
                )
        return self

    def allow(self, rows, cols):
        query = jnp.atleast_2d(self.query)[:, rows.reshape(-1)]
        key = jnp.atleast_2d(self.key)[:, cols.reshape(-1)]
        return query[:, None, :, None] == key[:, None, None, :]

    def kv_range(self, first, last, s):
        # Ids in any order: the keys whose id lies between the least and the greatest id of these
        # queries.
        query, key = jnp.atleast_2d(self.query), jnp.atleast_2d(self.key)
        index, ids = jnp.arange(query.shape[1], dtype=jnp.int32), jnp.iinfo(query.dtype)
        asking = ((index >= first) & (index <= last))[None]
        least = jnp.where(asking, query, ids.max).min(axis=1, keepdims=True)
        greatest = jnp.where(asking, query, ids.min).max(axis=1, keepdims=True)
        near = ((key >= least) & (key <= greatest)).any(axis=0)
        start, after = (jnp.argmax(x).astype(jnp.int32) for x in (near, near[::-1]))
        return KVRange(start, jnp.where(near.any(), s - after, 0), 0, 0)

    def row(self, b, n):
        return Segments(
            pick(jnp.atleast_2d(self.query), b, 0), pick(jnp.atleast_2d(self.key), b, 0)
        )

    def shift(self, start, t, s):
        (query, key), rows = map(jnp.atleast_2d, (self.query, self.key)), _rows_from(start, t)
        query, rows = (
            jnp.broadcast_to(x, (max(len(query), len(rows)), x.shape[1])) for x in (query, rows)
        )
        query = jnp.take_along_axis(query, rows, axis=1, mode="clip")
        return Segments(
            query, jnp.broadcast_to(key, (max(len(query), len(key)), key.shape[1]))[:, :s]
        )

    def check_whole(self, s):
        _check_whole("segments", self.query.shape[-1:], s)
        _check_whole("key segments", self.key.shape[-1:], s)


@dataclass(frozen=True)
class Dense(Part):
    """Any boolean array that broadcasts to `(b, n, t, s)`."""

    array: Bool[Array, ...]
    axes = {"array": ("batch", "heads", None, None)}

    def resolve(self, b, n, t, s):
        check_broadcast("mask", self.array.shape, (b, n, t, s))
        return self

    def allow(self, rows, cols):
        array = of_rank_4(self.array)
        array = array if array.shape[2] == 1 else array[:, :, rows.reshape(-1)]
        return array if array.shape[3] == 1 else array[:, :, :, cols.reshape(-1)]

    def row(self, b, n):
        array = pick(of_rank_4(self.array), b, 0)
        return Dense(array if n is None else pick(array, n, 1))

    def shift(self, start, t, s):
        array, rows = of_rank_4(self.array)[..., :s], _rows_from(start, t)
        if array.shape[2] > 1:
            # One row of the batch has one start, and so one set of rows; a single start serves all.
            array = jnp.broadcast_to(array, (max(len(array), len(rows)), *array.shape[1:]))
            array = (
                array[:, :, rows[0]]
                if len(rows) == 1
                else jax.vmap(lambda a, r: a[:, r])(array, rows)
            )
        return Dense(array)

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


def _rows_from(start: Count, t: int) -> Integer[Array, "#b t"]:
    return (
        jnp.asarray(bounded(start), jnp.int32).reshape(-1, 1) + jnp.arange(t, dtype=jnp.int32)[None]
    )


def _count_of_row(values: Any, b: int | Index) -> Any:
    return values if isinstance(values, int | None) else pick(jnp.atleast_1d(values), b, 0)


def _per_row(values: Count, more: int = 0) -> Array:
    return jnp.asarray(bounded(values, more), jnp.int32).reshape(-1, 1, 1, 1)
