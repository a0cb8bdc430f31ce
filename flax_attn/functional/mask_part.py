"""What a condition of a mask has to answer, and the answers that follow from others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Integer

from attn_spec.mask_checks import check_rows
from flax_attn.functional.kv_range import UNBOUNDED, KVRange, Limit, Tiles, bounded, greatest, least
from flax_attn.functional.shapes import Index
from flax_attn.functional.token_runs import Places

Count = int | Integer[Array, ""] | Integer[Array, " b"]


def _flatten(part):
    values = vars(part)
    traced = [name for name, value in values.items() if not isinstance(value, int | None)]
    static = tuple((name, value) for name, value in values.items() if name not in traced)
    return [values[name] for name in traced], (tuple(traced), static)


def _flatten_with_keys(part):
    children, static = _flatten(part)
    names, _ = static
    keys = map(jax.tree_util.GetAttrKey, names)
    return list(zip(keys, children, strict=True)), static


def _unflatten(cls, static, children):
    names, known = static
    # Children may be tracers or placeholders: nothing is checked again.
    part = object.__new__(cls)
    for name, value in (*known, *zip(names, children, strict=True)):
        object.__setattr__(part, name, value)
    return part


class MaskPart:
    """One condition on (query, key).

    Python integers stay static under `jax.jit`, arrays are traced. A new kind of part defines
    `allow`, or derives from `IntervalPart` and defines `interval`, and is then correct in every
    backend.

    Attributes:
        axes: axes of the arrays inside, by the name of the field: `"batch"`, `"heads"`, or None for
            one that is not divided among devices; aligned at the last. None is a part whose arrays
            are not known.
    """

    axes: dict[str, tuple[str | None, ...]] | None = None

    def __init_subclass__(cls):
        jax.tree_util.register_pytree_with_keys(
            cls, _flatten_with_keys, partial(_unflatten, cls), _flatten
        )

    def resolve(self, b: int, n: int, t: int, s: int) -> MaskPart:
        """Return the part for a call of this size, with its defaults filled in, or raise."""
        return self

    def sized(self, b: int | None, n: int | None) -> MaskPart:
        """Return the part for `b` rows of the batch and `n` heads; None leaves a number open."""
        return self

    def allow(self, rows: Index, cols: Index) -> Array:
        """Return the mask at query indices `(1, 1, t, 1)` and key indices `(1, 1, 1, s)`."""
        raise NotImplementedError

    def kv_range(self, first: Limit, last: Limit, s: int) -> KVRange:
        """Return which of `s` keys the queries `first` to `last` may see.

        By default any key may be seen, and no key is known to be seen by all queries.
        """
        return KVRange(0, s, 0, 0)

    @property
    def summarised(self) -> bool:
        """Whether `tiles` knows more than `kv_range`."""
        return False

    def tiles(self, first: Limit, last: Limit, starts: Index, stops: Index, s: int) -> Tiles:
        """Return what the queries `first` to `last` see of each run of keys.

        Run i is the keys from `starts[i]` to before `stops[i]`.
        """
        found = self.kv_range(first, last, s)
        seen = (starts < found.stop) & (stops > found.start)
        return Tiles(seen, (starts >= found.inner_start) & (stops <= found.inner_stop))

    def band(self) -> tuple[int | None, int | None] | None:
        """Return `(low, high)` if the part is `low <= key - query <= high`, else None.

        The bounds are integers known before tracing.
        """
        return None

    def row(self, b: int | Index, n: int | Index | None) -> MaskPart:
        """Return the part for one batch row and head, or for all heads."""
        if self.axes is None:
            return PlacedPart(self, b=_one(b), n=_one(n))
        at: dict[str | None, Any] = {"batch": b, "heads": n}
        picked = {name: _picked(getattr(self, name), axes, at) for name, axes in self.axes.items()}
        # A part with named axes is a dataclass, which the type of the base does not say.
        return replace(cast(Any, self), **picked)

    def shift(self, start: Count, t: int, s: int) -> MaskPart:
        """Return the part for the `t` queries from index `start` on, and the first `s` keys."""
        starts = jnp.asarray(start, jnp.int32).reshape(-1, 1)
        return PlacedPart(self, rows=Places(starts[0] if len(starts) == 1 else starts, t))

    def check_whole(self, s: int) -> None:
        """Raise unless arrays inside are those of a sequence of `s` tokens."""


class IntervalPart(MaskPart):
    """A part in which what a query sees is an interval of keys.

    A kind of interval is a dataclass with one method, `interval`; all else is derived from it here.
    Its fields are None, integers, or arrays of one integer or one a row of the batch.

    Attributes:
        from_first: whether the interval of every query begins at the first key.
    """

    from_first: ClassVar[bool] = False

    @property
    def axes(self):
        return dict.fromkeys(vars(self), ("batch",))

    def interval(self, i: Any) -> tuple[Any, Any]:
        """Return the first and the last key that query `i` sees.

        For integers inside and an integer `i` they are integers; else arrays that broadcast to
        `(b, 1, t, 1)`. Each goes one way as `i` grows, never back, and may lie outside the keys.
        """
        raise NotImplementedError

    def resolve(self, b, n, t, s):
        for name, value in vars(self).items():
            check_rows(name, value, b)
        return self

    def allow(self, rows, cols):
        first, last = self.interval(rows)
        allowed = jnp.ones((1, 1, 1, 1), bool)
        # An end that hides nothing is not compared: it would cost an array of the scores' size.
        if not _hides_none_before(first):
            allowed = allowed & (cols >= first)
        return allowed if _hides_none_after(last) else allowed & (cols <= last)

    def kv_range(self, first, last, s):
        # Each end of the interval goes one way, so that these two bound what lies between.
        first_ends = self.interval(first)
        last_ends = self.interval(last)
        starts, stops = zip(first_ends, last_ends, strict=True)
        inner = greatest(*starts), least(*stops) + 1
        return KVRange(least(*starts), greatest(*stops) + 1, *inner)

    def band(self):
        # Arrays are not read, and so not known to be the same for every query.
        if jax.tree.leaves(self):
            return None
        try:
            low, high = self.interval(_AnyQuery(0))
        except TypeError:  # an end is not the index of the query and a number
            return None
        known_low = isinstance(low, _AnyQuery) or _hides_none_before(low)
        known_high = isinstance(high, _AnyQuery) or _hides_none_after(high)
        if not (known_low and known_high):
            return None
        return getattr(low, "more", None), getattr(high, "more", None)


class _AnyQuery:
    """The index of a query of which nothing is known, and a number more.

    What can be computed with it is what is the same for every query.
    """

    # NumPy leaves the sum to `__radd__`.
    __array_ufunc__ = None

    def __init__(self, more: int):
        self.more = more

    def __add__(self, more: Any) -> Any:
        return _AnyQuery(self.more + more) if isinstance(more, int) else NotImplemented

    __radd__ = __add__

    def __sub__(self, less: Any) -> Any:
        return self + -less

    def __eq__(self, other: object) -> bool:
        raise TypeError("queries have different indices")

    def __bool__(self) -> bool:
        raise TypeError("queries have different indices")


def _hides_none_before(first: Any) -> bool:
    return isinstance(first, int) and first <= 0


def _hides_none_after(last: Any) -> bool:
    return isinstance(last, int) and last >= UNBOUNDED


@dataclass(frozen=True)
class PlacedPart(MaskPart):
    """A part of a mask at some of its rows of the batch, heads, queries and keys.

    Args:
        part: part for whole sequences.
        b: places of the rows of the batch; None is all, also below.
        n: places of the heads.
        rows: places of the queries.
        cols: places of the keys.
        s: number of keys in the whole sequences, where `cols` are some of them.
    """

    part: MaskPart
    b: Places | None = None
    n: Places | None = None
    rows: Places | None = None
    cols: Places | None = None
    s: int | None = None

    def allow(self, rows, cols):
        cols = _at(self.cols, cols.reshape(-1))[None, None, None, :]
        rows = _at(self.rows, rows.reshape(-1))
        differ = self.rows is not None and self.rows.differ
        found = self._blocks(rows, cols) if differ else self._block(rows, cols)
        found = _taken(self.b, found, 0)
        return _taken(self.n, found, 1)

    def _block(self, rows: Index, cols: Index) -> Array:
        """Return the wrapped part at query indices `(t,)` and key indices `(1, 1, 1, s)`."""
        return of_rank_4(self.part.allow(rows[None, None, :, None], cols))

    def _blocks(self, rows: Index, cols: Index) -> Array:
        """Return the same for query indices `(b, t)`, of which each row has its own."""

        def block_of_row(b, rows):
            return pick(self._block(rows, cols), b, 0)[0]

        return jax.vmap(block_of_row)(jnp.arange(len(rows), dtype=jnp.int32), rows)

    def kv_range(self, first, last, s):
        first, last = self._limits(first, last)
        found = self.part.kv_range(first, last, s if self.s is None else self.s)
        # The places keep the order of the tokens, so an interval of the whole is one of the part.
        return found if self.cols is None else found.counted(self.cols.before)

    def _limits(self, first: Limit, last: Limit) -> tuple[Limit, Limit]:
        if self.rows is None:
            return first, last
        first, last = self.rows.of(first), self.rows.of(last)
        return (first.min(), last.max()) if self.rows.differ else (first, last)

    @property
    def summarised(self):
        return self.part.summarised

    def tiles(self, first, last, starts, stops, s):
        if self.cols is not None:
            starts, stops = self.cols.of(starts), self.cols.of(stops - 1) + 1
        s = s if self.s is None else self.s
        first, last = self._limits(first, last)
        return self.part.tiles(first, last, starts, stops, s)

    def row(self, b, n):
        # The wrapped part counts in the whole, and the caller in this device's share.
        part = self.part.row(_at(self.b, b), _at(self.n, n))
        heads = self.n if n is None else None
        if self.rows is None and self.cols is None and heads is None:
            return part
        rows = None if self.rows is None else self.rows.row(b)
        return replace(self, part=part, b=None, n=heads, rows=rows)


def _at(places: Places | None, index: Any) -> Any:
    return index if places is None or index is None else places.of(index)


def _taken(places: Places | None, array: Array, axis: int) -> Array:
    return array if places is None else places.take(array, axis)


def _one(index: Any) -> Places | None:
    return None if index is None else Places(jnp.asarray(index, jnp.int32).reshape(1), 1)


def _picked(value: Any, axes: tuple[str | None, ...], at: dict[str | None, Any]) -> Any:
    if isinstance(value, int | None):
        return value
    array = value.reshape((1,) * (len(axes) - value.ndim) + value.shape)
    for axis, name in enumerate(axes):
        array = pick(array, at.get(name), axis)
    return array


def of_rank_4(array: Array) -> Array:
    """Return the array with axes of one before its own, so that it has four."""
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def pick(array: Array, index: int | Index | None, axis: int) -> Array:
    """Return the array at one index of an axis, which stays; None is all of it.

    An axis of one serves every index.
    """
    if index is None:
        return array
    # A slice is moved to where it fits.
    return jax.lax.dynamic_slice_in_dim(array, index, 1, axis)


def per_row(values: Count, more: int = 0) -> int | Array:
    """Return `values + more` as `interval` needs it: an integer, or an array `(#b, 1, 1, 1)`."""
    total = bounded(values, more)
    return total if isinstance(total, int) else total.reshape(-1, 1, 1, 1)
