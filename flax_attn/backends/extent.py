"""Which keys the arrays of a mask can show to some queries: integers known only when the program runs."""

from __future__ import annotations

from functools import reduce, singledispatch
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.functional.mask_parts import Causal, Dense, Lengths, Part, Prefix, Segments, Window
from flax_attn.functional.masks import Mask

_FAR = 2**29  # beyond every index, and sums of two of them are still integers


class Extent(NamedTuple):
    """Keys outside `[start, stop)` are hidden from all queries; those of it below `open` are seen by all of them."""

    start: Array
    stop: Array
    open: Array

    def __and__(self, other: Extent) -> Extent:
        return Extent(
            jnp.maximum(self.start, other.start), jnp.minimum(self.stop, other.stop), jnp.minimum(self.open, other.open)
        )


def extent(mask: Mask, first: Array, last: Array, s: int) -> Extent:
    """Return what queries `first` to `last`, both included, may see of `s` keys in a mask of one row and one head.

    Example:
        >>> extent(Mask.lengths(key=jnp.array([3])), jnp.int32(0), jnp.int32(7), s=8)
        Extent(start=Array(0, dtype=int32), stop=Array(3, dtype=int32), open=Array(3, dtype=int32))
    """
    return reduce(Extent.__and__, (_extent(part, first, last, s) for part in mask.parts), _between(0, s, s))


def _between(start, stop, open_stop) -> Extent:
    return Extent(*(_int32(x) for x in (start, stop, open_stop)))


def _int32(count) -> Array:
    if isinstance(count, int):  # may exceed what the dtype holds, and is beyond every index long before
        count = max(-_FAR, min(count, _FAR))
    return jnp.asarray(count).astype(jnp.int32).reshape(())


@singledispatch
def _extent(part: Part, first, last, s) -> Extent:
    raise NotImplementedError(f"no extent is known for a mask with {type(part).__name__}")


@_extent.register
def _(part: Dense, first, last, s) -> Extent:
    return _between(0, s, 0)


@_extent.register
def _(part: Causal, first, last, s) -> Extent:
    offset = _int32(part.offset)
    return _between(0, last + offset + 1, first + offset + 1)


@_extent.register
def _(part: Window, first, last, s) -> Extent:
    offset = _int32(part.offset)
    start = 0 if part.left is None else first + offset - _int32(part.left)
    return _between(start, s if part.right is None else last + offset + 1 + _int32(part.right), 0)


@_extent.register
def _(part: Prefix, first, last, s) -> Extent:
    offset, length = _int32(part.offset), _int32(part.length)
    return _between(0, *(jnp.maximum(i + offset + 1, length) for i in (last, first)))


@_extent.register
def _(part: Lengths, first, last, s) -> Extent:
    query, key = (_int32(_FAR if count is None else count) for count in (part.query, part.key))
    return _between(0, jnp.where(first < query, key, 0), jnp.where(last < query, key, 0))


@_extent.register
def _(part: Segments, first, last, s) -> Extent:
    # Ids in any order: the keys between the first and the last whose id lies between the least and the greatest asked.
    query, key = part.query.reshape(-1), part.key.reshape(-1)
    index = jnp.arange(query.size, dtype=jnp.int32)
    asked = (index >= first) & (index <= last)
    least = jnp.where(asked, query, jnp.iinfo(query.dtype).max).min().astype(key.dtype)
    most = jnp.where(asked, query, jnp.iinfo(query.dtype).min).max().astype(key.dtype)
    near = (key >= least) & (key <= most)
    return _between(jnp.argmax(near), jnp.where(near.any(), s - jnp.argmax(near[::-1]), 0), 0)
