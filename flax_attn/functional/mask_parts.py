"""The conditions that masks are made of, decided from the indices of queries and keys alone.

`True` means attend, everywhere. Query `i` has position `offset + i`, key `j` has position `j`.
"""

from dataclasses import dataclass, field, replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Integer

from attn_spec.attention_checks import check_broadcast, check_offset
from attn_spec.mask_checks import check_offset_given, check_rows, check_segment_ids, check_whole
from flax_attn.functional.kv_range import (
    UNBOUNDED,
    KVRange,
    Limit,
    between,
    bounded,
    maximum,
    plus,
    true_range,
    where,
)
from flax_attn.functional.mask_part import Count, IntervalPart, MaskPart, of_rank_4, per_row


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
        return i + per_row(self.first_position, distance)

    def shift(self, start, t, s):
        return replace(self, offset=plus(self.first_position, start))


@dataclass(frozen=True)
class Causal(Positioned, IntervalPart):
    """Key `j` is seen from position `p` when `j <= p`."""

    from_first = True

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
        last = UNBOUNDED if self.right is None else self.position(i, self.right)
        return first, last


@dataclass(frozen=True)
class Prefix(Positioned, IntervalPart):
    """Key `j` is seen from position `p` when `j <= p` or `j < length`."""

    from_first = True

    length: Count

    def interval(self, i):
        return 0, maximum(self.position(i), per_row(self.length, -1))


@dataclass(frozen=True)
class Lengths(IntervalPart):
    """Query `i` sees key `j` when `i < query` and `j < key`; None is unbounded."""

    from_first = True

    query: Count | None = None
    key: Count | None = None

    def resolve(self, b, n, t, s):
        check_rows("query lengths", self.query, b)
        check_rows("key lengths", self.key, b)
        return self

    def interval(self, i):
        last = UNBOUNDED if self.key is None else per_row(self.key, -1)
        if self.query is None:
            return 0, last
        # A query of padding sees up to key -1, and so none.
        return 0, where(i < per_row(self.query), last, -1)

    def shift(self, start, t, s):
        query = None if self.query is None else plus(self.query, -bounded(start))
        return replace(self, query=query)


@dataclass(frozen=True)
class Segments(MaskPart):
    """Query `i` sees key `j` when their segment ids are equal."""

    query: Integer[Array, "*b t"]
    key: Integer[Array, "*b s"]
    axes = {"query": ("batch", None), "key": ("batch", None)}

    def resolve(self, b, n, t, s):
        check_segment_ids("query", self.query.shape, b, t)
        check_segment_ids("key", self.key.shape, b, s)
        return self

    def allow(self, rows, cols):
        query = jnp.atleast_2d(self.query)[:, rows.reshape(-1)]
        key = jnp.atleast_2d(self.key)[:, cols.reshape(-1)]
        return query[:, None, :, None] == key[:, None, None, :]

    def kv_range(self, first, last, s):
        lowest, highest = self._ids_of(first, last)
        key = jnp.atleast_2d(self.key)
        # Ids may stand in any order, and none is known to lie between these queries' ids alone.
        near = (key >= lowest) & (key <= highest)
        return KVRange(*true_range(near.any(axis=0), s), 0, 0)

    def _ids_of(self, first: Limit, last: Limit) -> tuple[Array, Array]:
        """Return the least and the greatest id of these queries in each row, `(#b, 1)`."""
        query = jnp.atleast_2d(self.query)
        asking = between(query.shape[1], first, last)[None]
        ids = jnp.iinfo(query.dtype)
        lowest = jnp.where(asking, query, ids.max).min(axis=1, keepdims=True)
        highest = jnp.where(asking, query, ids.min).max(axis=1, keepdims=True)
        return lowest, highest

    def shift(self, start, t, s):
        query = _from(jnp.atleast_2d(self.query), 1, start, t)
        key = jnp.atleast_2d(self.key)[:, :s]
        # There are as many of both.
        rows = max(len(query), len(key))
        return Segments(query, jnp.broadcast_to(key, (rows, key.shape[1])))

    def check_whole(self, s):
        check_whole("segments", self.query.shape[-1:], s)
        check_whole("key segments", self.key.shape[-1:], s)


@dataclass(frozen=True)
class Dense(MaskPart):
    """Any boolean array that broadcasts to `(b, n, t, s)`."""

    array: Bool[Array, "..."]
    axes = {"array": ("batch", "heads", None, None)}

    def resolve(self, b, n, t, s):
        check_broadcast("mask", self.array.shape, (b, n, t, s))
        return self

    def allow(self, rows, cols):
        array = of_rank_4(self.array)
        array = array if array.shape[2] == 1 else array[:, :, rows.reshape(-1)]
        return array if array.shape[3] == 1 else array[:, :, :, cols.reshape(-1)]

    def shift(self, start, t, s):
        array = of_rank_4(self.array)[..., :s]
        return Dense(array if array.shape[2] == 1 else _from(array, 2, start, t))

    def check_whole(self, s):
        check_whole("mask", [size for size in self.array.shape[-2:] if size != 1], s)


def _from(array: Array, axis: int, start: Count, t: int) -> Array:
    """Return the array at `t` indices of an axis, from one start or from one a row of the batch."""
    starts = jnp.asarray(bounded(start), jnp.int32)
    rows = jnp.arange(t, dtype=jnp.int32)
    if starts.size == 1:
        return array.take(starts.reshape(()) + rows, axis, mode="clip")
    return _from_each(array, axis, starts, rows)


def _from_each(array: Array, axis: int, starts: Array, rows: Array) -> Array:
    # Not by `jax.vmap`, which asks that a mesh divides both arrays alike.
    starts = starts.reshape(-1, *[1] * (array.ndim - 1))
    array = jnp.broadcast_to(array, (len(starts), *array.shape[1:]))
    shape = [1] * array.ndim
    shape[axis] = len(rows)
    return jnp.take_along_axis(array, starts + rows.reshape(shape), axis, mode="clip")
