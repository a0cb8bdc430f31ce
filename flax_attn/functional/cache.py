"""The cache of keys and values: a plain value, passed in and returned, never hidden in a module."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax.typing import Dtype
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Integer

from flax_attn.functional.checks import check_lengths, check_positive, check_room, check_window
from flax_attn.functional.mask_parts import Count
from flax_attn.functional.masks import Mask, as_mask
from flax_attn.functional.shapes import ArrayLike, Key, Value


class Extended(NamedTuple):
    """What the queries of new tokens attend to, and the cache that holds these tokens too.

    Args:
        key: `(b, s, k, h)`.
        value: `(b, s, k, v)`.
        mask: of the queries of the new tokens, for these keys.
        key_positions: `(b, s)`, where each key stands in its sequence; -1 where there is none.
        cache: with the new tokens.
    """

    key: Key
    value: Value
    mask: Mask
    key_positions: Integer[Array, "*b s"]
    cache: KVCache


@dataclass(frozen=True)
class KVCache:
    """The keys and values of the tokens so far, each row of the batch with its own number of them.

        held = cache.extend(key, value, Mask.causal())
        output = dot_product_attention(query, held.key, held.value, mask=held.mask)
        cache = held.cache

    A pytree of fixed shapes: it goes through `jit`, `vmap`, `lax.scan` and `lax.while_loop`. Keys are stored after
    rotation. With `window` it rolls: the slots of tokens that no later query sees are used again, and a sequence has
    no end. Without, tokens beyond the capacity are an error where the lengths are known; where they are traced, nothing
    is overwritten and the row is marked: `invalid` tells, and modules turn its output into NaN.

    Args:
        key: `(b, k, s, h)`, heads first, so that a step reads the keys of a head in one piece; s is the capacity.
        value: `(b, k, s, v)`.
        length: how many tokens each row holds or, in one that rolls, has seen: `(b,)`. An integer serves all rows and
            stays static: `KVCache(key, value, 0)` is known to be empty, so that kernels skip what is.
        window: of a sliding window, how many keys in all a query sees; None keeps all.

    Shapes:
        All without b for one sequence.

    Raises:
        ValueError: if tokens do not fit, a mask is not that of the whole sequence, or the capacity is less than the
            window.

    Example:
        >>> cache = KVCache.zeros(2, 8, num_kv_heads=3, head_dim=4)
        >>> new = jnp.ones((2, 5, 3, 4))
        >>> held = cache.extend(new, new, Mask.causal(), lengths=jnp.array([5, 2]))
        >>> held.key.shape, held.cache.length.tolist()
        ((2, 8, 3, 4), [5, 2])
    """

    key: Float[Array, "*b k s h"]
    value: Float[Array, "*b k s v"]
    length: Count
    window: int | None = None

    @staticmethod
    def zeros(
        b: int | None,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        window: int | None = None,
        dtype: Dtype = jnp.float32,
    ) -> KVCache:
        """Return an empty cache; b None is that of one sequence without a batch axis.

        One that rolls takes up to `capacity - window + 1` tokens a call in place, and more at the price of a copy.
        """
        check_positive(capacity=capacity, num_kv_heads=num_kv_heads, head_dim=head_dim)
        check_window(window, capacity)
        batch = () if b is None else (b,)
        keys, values = (jnp.zeros((*batch, num_kv_heads, capacity, head_dim), dtype) for _ in range(2))
        return KVCache(keys, values, jnp.zeros(batch, jnp.int32), window)

    @property
    def capacity(self) -> int:
        """How many tokens fit."""
        return self.key.shape[-2]

    @property
    def invalid(self) -> Bool[Array, "*b"]:
        """Which rows were given more tokens than fit: what they hold is not the whole sequence."""
        lengths = self._lengths
        return jnp.zeros_like(lengths, bool) if self.window else lengths > self.capacity

    @property
    def key_positions(self) -> Integer[Array, "*b s"]:
        """Where the key of each slot stands in its sequence; -1 where there is none."""
        lengths = self._lengths[..., None]
        slots = jnp.broadcast_to(jnp.arange(self.capacity, dtype=jnp.int32), (*self._lengths.shape, self.capacity))
        # Of the positions that share a slot, the last that is there.
        positions = slots + (lengths - 1 - slots) // self.capacity * self.capacity if self.window else slots
        return jnp.where((positions >= 0) & (positions < lengths), positions, -1)

    def positions(self, t: int, lengths: ArrayLike | int | None = None) -> Integer[Array, "*b t"]:
        """Return where the next `t` tokens will stand in their sequences; 0 for padding, behind `lengths` of them."""
        held = self._lengths
        ahead = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (*held.shape, t))
        if lengths is None:
            return held[..., None] + ahead
        # Counted on, padding would leave tables of positions that have room for what is real.
        real = ahead < jnp.broadcast_to(jnp.asarray(lengths, jnp.int32), held.shape)[..., None]
        return jnp.where(real, held[..., None] + ahead, 0)

    def append(self, key: Key, value: Value, lengths: ArrayLike | int | None = None) -> KVCache:
        """Return the cache with new tokens behind those it holds.

        Args:
            key: `(b, t, k, h)`, turned by its positions already.
            value: `(b, t, k, v)`.
            lengths: how many of the new tokens of each row are real, `(b,)`; what follows them is padding and is not
                stored. None is all.
        """
        if key.ndim == 3:
            return self._batched().append(key[None], value[None], lengths)._unbatched()
        t = key.shape[1]
        new = t if lengths is None else lengths if isinstance(lengths, int) else jnp.asarray(lengths, jnp.int32)
        length = self.length + new
        if not isinstance(new, Tracer):
            self._check(np.asarray(new), t)
        keys, values = (self._write(held, x, new) for held, x in ((self.key, key), (self.value, value)))
        return KVCache(keys, values, length, self.window)

    def extend(
        self, key: Key, value: Value, mask: Mask | Array | None = None, lengths: ArrayLike | int | None = None
    ) -> Extended:
        """Return the keys, the values and the mask that the queries of new tokens attend with, and the cache after.

        Args:
            key: `(b, t, k, h)`, of the new tokens alone, turned by its positions already.
            value: `(b, t, k, v)`.
            mask: that of the whole sequence, of `(capacity, capacity)` tokens where it holds arrays, the same in every
                call: the rows of the new tokens are taken from it. What is not there yet is hidden in any case.
            lengths: how many of the new tokens of each row are real, `(b,)`; None is all.
        """
        if key.ndim == 3:
            held = self._batched().extend(key[None], value[None], mask, lengths)
            key, value, positions = held.key[0], held.value[0], held.key_positions[0]
            return Extended(key, value, held.mask, positions, held.cache._unbatched())
        t, after = key.shape[1], self.append(key, value, lengths)
        dtype, real = key.dtype, Mask.lengths(query=lengths)
        if self.window is None:
            as_mask(mask).check_whole(self.capacity)
            mask = as_mask(mask).shift(self.length, t, self.capacity) & Mask.lengths(key=after.length)
            keys, values = after._tokens_first(dtype)
            return Extended(keys, values, mask & real, after.key_positions, after)
        mask = as_mask(mask) & Mask.sliding_window(self.window)
        if isinstance(self.length, int) and self.length == 0:  # nothing older: the structure of the mask can stay
            positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (len(key), t))
            return Extended(key, value, mask.shift(0, t, t) & Mask.lengths(key=lengths) & real, positions, after)
        if t <= self.capacity - self.window + 1:
            (keys, values), positions = after._tokens_first(dtype), after.key_positions
        else:  # the first of the new queries see keys that the last of the new tokens take the slots of
            old, rows = self._tokens_first(dtype), self.positions(t)
            keys, values = (jnp.concatenate(pair, axis=1) for pair in zip(old, (key, value), strict=True))
            rows = rows if lengths is None else jnp.where(rows < rearrange(after._lengths, "b -> b 1"), rows, -1)
            positions = jnp.concatenate([self.key_positions, rows], axis=1)
        visible = mask.at(self.positions(t), positions) & rearrange(positions >= 0, "b s -> b 1 1 s")
        return Extended(keys, values, Mask.dense(visible) & real, positions, after)

    def _check(self, new: np.ndarray, t: int) -> None:
        check_lengths(int(new.max(initial=0)), t)
        if self.window is not None:
            return
        if isinstance(self.length, Tracer):
            check_room(self.capacity, None, int(new.max(initial=0)))
            return
        for held, more in np.broadcast(np.asarray(self.length), new):
            check_room(self.capacity, int(held), int(more))

    @property
    def _lengths(self) -> Integer[Array, "*b"]:
        return jnp.broadcast_to(jnp.asarray(self.length, jnp.int32), self.key.shape[:-3])

    def _write(self, held: Array, new: Array, count: Count) -> Array:
        t, new = new.shape[1], new.astype(held.dtype)
        if isinstance(self.length, int) and self.length + t <= self.capacity:
            # One slice for all rows: what is written beyond a row's length is hidden, and overwritten in time.
            return held.at[:, :, self.length : self.length + t].set(rearrange(new, "b t k h -> b k t h"))
        i = jnp.arange(t, dtype=jnp.int32)[None]
        count = jnp.broadcast_to(jnp.asarray(count, jnp.int32), new.shape[:1])[:, None]
        slots = self.positions(t)
        if self.window is not None:
            slots = jnp.where(i >= count - self.capacity, slots % self.capacity, self.capacity)
        slots = jnp.where(i < count, slots, self.capacity)
        if len(new) == 1:  # of one row XLA makes a slice, which it does not write in place: so head by head
            return held[0].at[jnp.arange(new.shape[2])[None], slots[0][:, None]].set(new[0], mode="drop")[None]
        return held.at[jnp.arange(len(new))[:, None], :, slots].set(new, mode="drop")

    def _tokens_first(self, dtype: Dtype) -> tuple[Array, Array]:
        key, value = (rearrange(x.astype(dtype), "b k s h -> b s k h") for x in (self.key, self.value))
        return key, value

    def _batched(self) -> KVCache:
        return jax.tree.map(lambda x: x[None], self)

    def _unbatched(self) -> KVCache:
        return jax.tree.map(lambda x: x[0], self)


def _flatten(cache: KVCache):
    static = cache.length if isinstance(cache.length, int) else None
    traced = (cache.key, cache.value) if static is not None else (cache.key, cache.value, cache.length)
    return traced, (static, cache.window)


def _unflatten(static, traced) -> KVCache:
    cache = object.__new__(KVCache)  # children may be placeholders: nothing is checked
    values = zip([field.name for field in dataclasses.fields(KVCache)], (*traced, static[0])[:3], strict=False)
    for name, value in (*values, ("window", static[1])):
        object.__setattr__(cache, name, value)
    return cache


jax.tree_util.register_pytree_node(KVCache, _flatten, _unflatten)
