"""Which keys a range of queries may see: as Python integers where that is known before tracing, else as arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Integer

Limit = int | Integer[Array, ""]
UNBOUNDED = 2**29  # beyond every index; sums of a few of these still fit int32


class KVRange(NamedTuple):
    """The keys that some queries may see, of `s`.

    Keys outside `[start, stop)` are hidden from all of these queries. Keys inside `[inner_start, inner_stop)` are seen
    by all of them, so that they need no mask. Both may be empty, with a stop at or before the start.

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
        inner_start, inner_stop = self.inner_start, self.inner_stop
        return KVRange(start, stop, maximum(inner_start, other.inner_start), minimum(inner_stop, other.inner_stop))

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


def limits(count: Any) -> tuple[Limit, Limit]:
    """Return the least and the greatest of an integer or an array of integers, as limits that can be added.

    Example:
        >>> limits(2**70), limits(jnp.array([3, -1]))
        ((536870912, 536870912), (Array(-1, dtype=int32), Array(3, dtype=int32)))
    """
    if isinstance(count, int):
        count = max(-UNBOUNDED, min(count, UNBOUNDED))
        return count, count
    count = jnp.asarray(count).astype(jnp.int32)
    return count.min(initial=UNBOUNDED), count.max(initial=-UNBOUNDED)


def minimum(a: Limit, b: Limit) -> Limit:
    """Return the smaller limit, an integer if both are."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def maximum(a: Limit, b: Limit) -> Limit:
    """Return the larger limit, an integer if both are."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)


def where(condition: Any, a: Limit, b: Limit) -> Limit:
    """Return `a` if the condition holds, else `b`: an integer if the condition and what it chooses are."""
    if isinstance(condition, bool):
        return a if condition else b
    return jnp.where(condition, a, b).astype(jnp.int32)
