"""Where the tokens of one part of a sequence are in the whole of it.

Only in flax_attn: torch_ref runs on one device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.functional.dropout import KeyedDropout
from flax_attn.functional.shapes import Index


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Places:
    """Tokens taken from a sequence in runs of `size`: run i holds the tokens from `starts[i]` on.

    The runs follow one another in the sequence, so that the order of the tokens is kept: an
    interval of the sequence is an interval of the part.

    Args:
        starts: `(runs,)`, increasing, at least `size` apart; may be traced. One run may begin
            elsewhere in each row of the batch: `(b, 1)`.
        size: tokens in a run.

    Example:
        >>> places = Places(jnp.array([2, 9]), 3)
        >>> places.of(jnp.arange(6))
        Array([ 2,  3,  4,  9, 10, 11], dtype=int32)
        >>> places.before(jnp.array([3, 7, 10]))
        Array([1, 3, 4], dtype=int32)
    """

    # An Array, or what JAX's transforms put in its place.
    starts: Any
    size: int = field(metadata={"static": True})

    @property
    def differ(self) -> bool:
        """Whether each row of the batch has tokens of its own."""
        return self.starts.ndim == 2

    def row(self, b: Any) -> Places:
        """Return the places of one row of the batch."""
        if not self.differ:
            return self
        return Places(jax.lax.dynamic_slice_in_dim(self.starts, b, 1, 0)[0], self.size)

    def of(self, index: Any) -> Index:
        """Return the index in the sequence of each index in the part.

        Beyond the ends of the part, the indices in the sequence count on.
        """
        starts = jnp.asarray(self.starts, jnp.int32)
        index = jnp.asarray(index, jnp.int32)
        # The most common by far, without a search for the run.
        if starts.shape[-1] == 1:
            return starts[0] + index if starts.ndim == 1 else starts + index.reshape(1, -1)
        run = jnp.clip(index // self.size, 0, len(starts) - 1)
        return starts[run] + index - run * self.size

    def before(self, position: Any) -> Index:
        """Return how many tokens of the part stand before an index of the sequence."""
        position = jnp.asarray(position, jnp.int32)
        starts = jnp.asarray(self.starts, jnp.int32).reshape(-1, *(1,) * position.ndim)
        # Of each run none, some or all of its tokens.
        return jnp.clip(position[None] - starts, 0, self.size).sum(axis=0, dtype=jnp.int32)

    def take(self, array: Array, axis: int) -> Array:
        """Return the tokens of the part from an array of the whole sequence.

        An axis of size 1 serves all tokens.
        """
        if array.shape[axis] == 1:
            return array
        take = jax.lax.dynamic_slice_in_dim
        runs = [take(array, start, self.size, axis) for start in self.starts]
        return runs[0] if len(runs) == 1 else jnp.concatenate(runs, axis)

    def put(self, array: Array, part: Array, axis: int) -> Array:
        """Return an array of the whole sequence with the part added in its place."""
        if array.shape[axis] == 1:
            return array + part
        # The runs lie apart in the whole: each is added where it begins.
        runs = jnp.split(part, len(self.starts), axis)
        for start, run in zip(self.starts, runs, strict=True):
            array = _added(array, run, start, axis)
        return array


def _added(array: Array, run: Array, start: Array, axis: int) -> Array:
    """Return an array with a run added to it from an index on."""
    old = jax.lax.dynamic_slice_in_dim(array, start, run.shape[axis], axis)
    new = old + run.astype(array.dtype)
    return jax.lax.dynamic_update_slice_in_dim(array, new, start, axis)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlacedDropout(KeyedDropout):
    """Dropout of a part of a call: it drops what is dropped there of the whole.

    Args:
        places: places of the rows of the batch, heads, queries and keys of the part in the whole.
    """

    places: tuple[Places, Places, Places, Places]

    def indices(self, *parts: Index) -> tuple[Index, ...]:
        return tuple(places.of(index) for places, index in zip(self.places, parts, strict=True))
