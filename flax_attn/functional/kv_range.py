"""Which keys a range of queries may see.

The answer is in Python integers where it is known before tracing, else in arrays.

Only in flax_attn: kernels ask for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Integer

from flax_attn.functional.shapes import Index

Limit = int | Integer[Array, "..."]
# Beyond every index; sums of a few of these still fit int32.
UNBOUNDED = 2**29
_INT32 = np.iinfo(np.int32)


class KVRange(NamedTuple):
    """The keys that some queries may see, of `s`.

    Keys outside `[start, stop)` are hidden from all of these queries. Keys inside `[inner_start,
    inner_stop)` are seen by all of them, so that they need no mask. Both may be empty, with a stop
    at or before the start.

    Example:
        >>> KVRange(2, 9, 4, 7) & KVRange(0, 8, 0, 6)
        KVRange(start=2, stop=8, inner_start=4, inner_stop=6)
    """

    start: Limit
    stop: Limit
    inner_start: Limit
    inner_stop: Limit

    def __and__(self, other: KVRange) -> KVRange:
        start, stop = maximum(self.start, other.start), minimum(self.stop, other.stop)
        if self.needs_mask or other.needs_mask:
            return KVRange(start, stop, 0, 0)
        inner_start = maximum(self.inner_start, other.inner_start)
        return KVRange(start, stop, inner_start, minimum(self.inner_stop, other.inner_stop))

    def counted(self, before: Callable[[Limit], Limit]) -> KVRange:
        """Return the range in some of the keys, given how many of them stand before a limit."""
        start, stop = before(self.start), before(self.stop)
        # It stays known before tracing that the inner range is empty.
        if self.needs_mask:
            return KVRange(start, stop, 0, 0)
        return KVRange(start, stop, before(self.inner_start), before(self.inner_stop))

    @property
    def needs_mask(self) -> bool:
        """Whether the inner range is known before tracing to be empty."""
        start, stop = self.inner_start, self.inner_stop
        return isinstance(start, int) and isinstance(stop, int) and stop <= start


class Tiles(NamedTuple):
    """What some queries see of several runs of keys.

    Args:
        some: whether one of them may see one of the keys; if not, the tile is empty.
        whole: whether all of them see all of the keys, so that the tile needs no mask.
    """

    some: Bool[Array, " tiles"]
    whole: Bool[Array, " tiles"]

    def __and__(self, other: Tiles) -> Tiles:
        return Tiles(self.some & other.some, self.whole & other.whole)

    def over(self, starts: Index, stops: Index, size: int) -> Tiles:
        """Return the same of other runs of keys, where each of these runs holds `size` keys."""
        left = jnp.arange(len(self.some), dtype=jnp.int32)[None] * size
        right = left + size
        met = (left < stops[:, None]) & (right > starts[:, None])
        # A tile that lies outside of these keys says nothing about them.
        some = met & self.some[None]
        whole = ~met | self.whole[None]
        return Tiles(some.any(axis=1), whole.all(axis=1))


def bounded(values: Any, more: int = 0) -> int | Array:
    """Return `values + more`, clipped to `-UNBOUNDED` and `UNBOUNDED`.

    An integer gives an integer, an array one of int32.

    Example:
        >>> bounded(2**70, -5), bounded(jnp.array([2**31 - 1, 3]), 2**31)
        (536870912, Array([536870912, 536870912], dtype=int32))
    """
    if isinstance(values, int):
        return max(-UNBOUNDED, min(values + more, UNBOUNDED))
    # Values are clipped before they are added, to those whose sum is within: no sum wraps around.
    low = max(_INT32.min, min(-UNBOUNDED - more, _INT32.max))
    high = max(_INT32.min, min(UNBOUNDED - more, _INT32.max))
    steps = jnp.clip(as_int32(values), int(low), int(high)) - int(low)
    return steps + jnp.int32(bounded(int(low), more))


def plus(values: Any, more: Any) -> int | Array:
    """Return the sum of two counts: an integer if both are, else an array of int32.

    A sum beyond the ends of int32 becomes its end.

    Example:
        >>> plus(3, 4), plus(jnp.array([2**31 - 1, 3]), 4)
        (7, Array([2147483647,          7], dtype=int32))
    """
    if isinstance(values, int) and isinstance(more, int):
        return values + more
    values, more = jnp.atleast_1d(as_int32(values)), jnp.atleast_1d(as_int32(more))
    least = _INT32.min - jnp.minimum(more, 0)
    return jnp.clip(values, least, _INT32.max - jnp.maximum(more, 0)) + more


def as_int32(values: Any) -> Array:
    """Return integers as an array of int32; those beyond its ends become its ends.

    Example:
        >>> as_int32(2**40), as_int32(np.array([-(2**40), 3]))
        (Array(2147483647, dtype=int32), Array([-2147483648,           3], dtype=int32))
    """
    if isinstance(values, int):
        return jnp.int32(max(_INT32.min, min(values, _INT32.max)))
    return jnp.asarray(within_int32(values))


def within_int32(values: Array | np.ndarray) -> Array | np.ndarray | np.generic:
    """Return what `as_int32` does, and of NumPy's arrays one of NumPy."""
    ends = jnp.iinfo(values.dtype)
    if _INT32.min <= ends.min and ends.max <= _INT32.max:
        return values.astype(jnp.int32)
    # An array of 64 bits may be used where they are switched off: it is read in as many.
    enabled = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    with jax.enable_x64(enabled or values.dtype.itemsize == 8):
        return values.clip(max(_INT32.min, int(ends.min)), _INT32.max).astype(jnp.int32)


def minimum(a: Limit, b: Limit) -> Limit:
    """Return the smaller limit, an integer if both are."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def maximum(a: Limit, b: Limit) -> Limit:
    """Return the larger limit, an integer if both are."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)


def where(condition: Any, a: Limit, b: Limit) -> Limit:
    """Return `a` if the condition holds, else `b`; an array unless the condition is a bool."""
    if isinstance(condition, bool):
        return a if condition else b
    return jnp.where(condition, a, b).astype(jnp.int32)


def least(a: Limit, b: Limit) -> Limit:
    """Return the smallest of all limits in two: an integer if both are, else a scalar."""
    found = minimum(a, b)
    if isinstance(found, int):
        return found
    return found.reshape(()) if found.size == 1 else found.min(initial=UNBOUNDED)


def greatest(a: Limit, b: Limit) -> Limit:
    """Return the largest of all limits in two: an integer if both are, else a scalar."""
    found = maximum(a, b)
    if isinstance(found, int):
        return found
    return found.reshape(()) if found.size == 1 else found.max(initial=-UNBOUNDED)


def between(size: int, first: Limit, last: Limit) -> Bool[Array, " size"]:
    """Return which of `size` indices lie from `first` to `last`."""
    index = jnp.arange(size, dtype=jnp.int32)
    return (index >= first) & (index <= last)


def true_range(seen: Bool[Array, " s"], stop: int) -> tuple[Array, Array]:
    """Return where the first True stands, and the place after the last; `(0, 0)` for none.

    The places are counted to `stop`, which is after the last.
    """
    step = stop // len(seen)
    first = jnp.argmax(seen).astype(jnp.int32)
    after = jnp.argmax(seen[::-1]).astype(jnp.int32)
    return first * step, jnp.where(seen.any(), stop - after * step, 0)
