"""The cache of keys and values: a plain value, passed in and returned, never hidden in a module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax.typing import Dtype
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Integer

from attn_spec.cache_checks import check_cache_dtype, check_fits, check_lengths, check_ring_buffer
from attn_spec.checks import check_positive
from flax_attn.functional.cache_base import Cache
from flax_attn.functional.explicit_sharding import join, split_as
from flax_attn.functional.mask_part import Count
from flax_attn.functional.masks import Mask, as_mask
from flax_attn.functional.shapes import ArrayLike, Key, Value


class Extended(NamedTuple):
    """What the queries of new tokens attend to, and the cache after them.

    Args:
        key: `(b, s, k, h)`; s is the capacity, or fewer where the length of the cache is an
            integer.
        value: `(b, s, k, v)`.
        mask: mask of the queries of the new tokens over these keys.
        key_positions: `(b, s)`, the position of each key in its sequence; -1 where there is none.
        cache: cache with the new tokens.
    """

    key: Key
    value: Value
    mask: Mask
    key_positions: Integer[Array, "*b s"]
    cache: KVCache


@dataclass(frozen=True)
class KVCache(Cache):
    """The keys and values of the tokens so far, each row of the batch with its own number of them.

        extended = cache.extend(key, value, Mask.causal())
        output = dot_product_attention(query, extended.key, extended.value, mask=extended.mask)
        cache = extended.cache

    A pytree of fixed shapes: it goes through `jit`, `vmap`, `lax.scan` and `lax.while_loop`. Keys
    are stored after rotation. With `window` it is a ring buffer: new tokens overwrite those that no
    later query attends to, and a sequence has no end.

    Tokens that do not fit are an error where their number is known from shapes and Python integers.
    Arrays are not read, so that no call waits for the device: a row that is given more tokens than
    fit, or a length outside `0 ... t`, becomes `invalid`. It stores nothing more, and modules turn
    its output into NaN.

    Args:
        key: `(b, k, s, h)`, heads first, so that a step reads the keys of a head in one piece; s is
            the capacity.
        value: `(b, k, s, v)`.
        length: how many tokens of each row were cached, `(b,)`; -1 in a row that is invalid. An
            integer is for all rows and stays static: `KVCache(key, value, 0)` is known to be empty,
            so that kernels skip what is.
        window: width of a sliding window, the number of keys that a query attends to; None keeps
            all.

    Shapes:
        All without b for one sequence.

    Raises:
        ValueError: if tokens do not fit, a mask is not that of the whole sequence, or the capacity
            is less than the window.

    Example:
        >>> cache = KVCache.zeros(2, 8, num_kv_heads=3, head_dim=4)
        >>> new = jnp.ones((2, 5, 3, 4))
        >>> extended = cache.extend(new, new, Mask.causal(), lengths=jnp.array([5, 2]))
        >>> extended.key.shape, extended.cache.length.tolist()
        ((2, 8, 3, 4), [5, 2])
    """

    key: Float[Array, "*b k s h"]
    value: Float[Array, "*b k s v"]
    length: Count
    window: int | None = None
    static = ("window",)

    @staticmethod
    def zeros(
        b: int | None,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        window: int | None = None,
        dtype: Dtype = jnp.float32,
    ) -> KVCache:
        """Return an empty cache; b None is one sequence without a batch axis.

        `value_dim` is the width of the values, None that of the keys; 0 is a cache of keys alone. A
        ring buffer takes up to `capacity - window + 1` tokens a call in place, and more at the
        price of a copy.
        """
        check_positive(capacity=capacity, num_kv_heads=num_kv_heads, head_dim=head_dim)
        check_ring_buffer(window, capacity)
        check_cache_dtype(jnp.dtype(dtype).name)
        batch = () if b is None else (b,)
        widths = head_dim, head_dim if value_dim is None else value_dim
        keys, values = (
            jnp.zeros((*batch, num_kv_heads, capacity, width), dtype) for width in widths
        )
        return KVCache(keys, values, jnp.zeros(batch, jnp.int32), window)

    @property
    def batch(self) -> tuple[int, ...]:
        """The shape of the batch: `(b,)`, or `()` of one sequence."""
        return self.key.shape[:-3]

    @property
    def capacity(self) -> int:
        """How many tokens fit."""
        return self.key.shape[-2]

    @property
    def key_positions(self) -> Integer[Array, "*b s"]:
        """The position in its sequence of the key in each slot; -1 where there is none."""
        lengths = self.row_lengths[..., None]
        slots = jnp.broadcast_to(
            jnp.arange(self.capacity, dtype=jnp.int32), (*lengths.shape[:-1], self.capacity)
        )
        # Of the positions that share a slot of a ring buffer, the last one is cached.
        positions = (
            slots + (lengths - 1 - slots) // self.capacity * self.capacity if self.window else slots
        )
        return jnp.where((positions >= 0) & (positions < lengths), positions, -1)

    def check_heads(
        self, batch: tuple[int, ...], num_kv_heads: int, head_dim: int, value_dim: int
    ) -> None:
        """Raise unless the cache is floating point and fits these rows, heads and widths."""
        heads = (*batch, num_kv_heads, self.capacity)
        self.check_shapes({"key": (*heads, head_dim), "value": (*heads, value_dim)})

    def append(self, key: Key, value: Value, lengths: ArrayLike | int | None = None) -> KVCache:
        """Return the cache with new tokens behind the cached ones.

        Args:
            key: `(b, t, k, h)`, rotated by its positions already.
            value: `(b, t, k, v)`.
            lengths: how many of the new tokens of each row are real, `(b,)`; the rest is padding
                and is not stored. None is all.
        """
        self.check_heads(tuple(key.shape[:-3]), key.shape[-2], key.shape[-1], value.shape[-1])
        if key.ndim == 3:
            return self._batched().append(key[None], value[None], lengths)._unbatched()
        length, stored = self._count(key.shape[1], lengths)
        keys, values = (
            self._write(cached, x, stored) for cached, x in ((self.key, key), (self.value, value))
        )
        return KVCache(keys, values, length, self.window)

    def extend(
        self,
        key: Key,
        value: Value,
        mask: Mask | Array | None = None,
        lengths: ArrayLike | int | None = None,
    ) -> Extended:
        """Return what the queries of new tokens attend to, and the cache after them.

        Args:
            key: `(b, t, k, h)`, of the new tokens alone, rotated by its positions already.
            value: `(b, t, k, v)`.
            mask: mask of the whole sequence, of `(capacity, capacity)` tokens where it holds
                arrays, the same in every call: the rows of the new tokens are taken from it. Slots
                without a token are hidden in any case.
            lengths: how many of the new tokens of each row are real, `(b,)`; None is all.
        """
        self.check_heads(tuple(key.shape[:-3]), key.shape[-2], key.shape[-1], value.shape[-1])
        if key.ndim == 3:
            extended = self._batched().extend(key[None], value[None], mask, lengths)
            key, value, positions = extended.key[0], extended.value[0], extended.key_positions[0]
            return Extended(key, value, extended.mask, positions, extended.cache._unbatched())
        if self.window is None:
            extended = self._extend(key, value, as_mask(mask), lengths)
        else:
            extended = self._extend_ring_buffer(key, value, as_mask(mask), lengths, self.window)
        return extended._replace(mask=extended.mask & Mask.lengths(query=lengths))

    def _extend(
        self, key: Key, value: Value, mask: Mask, lengths: ArrayLike | int | None
    ) -> Extended:
        mask.check_whole(self.capacity)
        t, after = key.shape[1], self.append(key, value, lengths)
        # Where it is known how many tokens there are, the slots behind them cost nothing.
        s = min(self.length + t, self.capacity) if isinstance(self.length, int) else self.capacity
        mask = mask.shift(self.length, t, s) & Mask.lengths(key=after.length)
        keys, values = (x[:, :s] for x in after._tokens_first(key.dtype))
        return Extended(keys, values, mask, after.key_positions[:, :s], after)

    def _extend_ring_buffer(
        self, key: Key, value: Value, mask: Mask, lengths: ArrayLike | int | None, window: int
    ) -> Extended:
        t, after = key.shape[1], self.append(key, value, lengths)
        mask = mask & Mask.sliding_window(window)
        # Without older keys the structure of the mask is kept.
        if isinstance(self.length, int) and self.length == 0:
            positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), key.shape[:2])
            return Extended(
                key, value, mask.shift(0, t, t) & Mask.lengths(key=lengths), positions, after
            )
        if t <= self.capacity - window + 1:
            (keys, values), positions = after._tokens_first(key.dtype), after.key_positions
        else:
            # The last new tokens overwrite keys that the first new queries attend to.
            pairs = zip(self._tokens_first(key.dtype), (key, value), strict=True)
            keys, values = (join(*pair, axis=1) for pair in pairs)
            new = self.positions(t)
            new = jnp.where(new < rearrange(after.row_lengths, "b -> b 1"), new, -1)
            positions = jnp.concatenate([self.key_positions, new], axis=1)
        visible = mask.at(self.positions(t), positions) & rearrange(
            positions >= 0, "b s -> b 1 1 s"
        )
        return Extended(keys, values, Mask.dense(visible), positions, after)

    def _count(self, t: int, lengths: ArrayLike | int | None) -> tuple[Count, Count]:
        """Return the length of each row after `t` new tokens, and how many of them are stored."""
        new, cached = t if lengths is None else lengths, self.length
        if isinstance(new, int):
            check_lengths(new, t)
            if self.window is None:
                check_fits(self.capacity, cached if isinstance(cached, int) else 0, new)
            if isinstance(cached, int):
                return cached + new, new
        cached = self.row_lengths
        new = jnp.broadcast_to(jnp.asarray(new, jnp.int32), cached.shape)
        valid = (cached >= 0) & (new >= 0) & (new <= t)
        valid = valid if self.window else valid & (cached + new <= self.capacity)
        return jnp.where(valid, cached + new, -1), jnp.where(valid, new, 0)

    def _write(self, cached: Array, new: Array, count: Count) -> Array:
        t, new = new.shape[1], new.astype(cached.dtype)
        if isinstance(self.length, int) and self.length + t <= self.capacity:
            # One slice for all rows: what is written beyond a row's length is hidden, and
            # overwritten in time.
            place = cached.at[:, :, self.length : self.length + t]
            return place.set(rearrange(new, "b t k h -> b k t h"), out_sharding=_split(cached, new))
        i = jnp.arange(t, dtype=jnp.int32)[None]
        count = jnp.broadcast_to(jnp.asarray(count, jnp.int32), new.shape[:1])[:, None]
        slots = self.positions(t)
        if self.window is not None:
            slots = jnp.where(i >= count - self.capacity, slots % self.capacity, self.capacity)
        slots = jnp.where(i < count, slots, self.capacity)
        write = _to_one_row if len(new) == 1 else _to_rows
        return (
            _as_bits(write, cached, new, slots)
            if cached.dtype.itemsize == 2
            else write(cached, new, slots)
        )

    def _tokens_first(self, dtype: Dtype) -> tuple[Array, Array]:
        key, value = (
            rearrange(x.astype(dtype), "b k s h -> b s k h") for x in (self.key, self.value)
        )
        return key, value

    def _batched(self) -> KVCache:
        return jax.tree.map(lambda x: x[None], self)

    def _unbatched(self) -> KVCache:
        return jax.tree.map(lambda x: x[0], self)


def _to_one_row(cached: Array, new: Array, slots: Array) -> Array:
    # Head by head: of a whole token XLA makes a slice, which it does not write in place.
    place = cached[0].at[jnp.arange(new.shape[2])[None], slots[0][:, None]]
    split = split_as(cached, 1, 2, 3) or split_as(new, 2, None, 3)
    return place.set(new[0], mode="drop", out_sharding=split)[None]


def _to_rows(cached: Array, new: Array, slots: Array) -> Array:
    place = cached.at[jnp.arange(len(new))[:, None], :, slots]
    return place.set(new, mode="drop", out_sharding=_split(cached, new))


def _split(cached: Array, new: Array) -> NamedSharding | None:
    # A cache that was made without a mesh is split as the tokens that come to it.
    return split_as(cached, *range(4)) or split_as(new, 0, 2, None, 3)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _as_bits(write: Callable[..., Array], cached: Array, new: Array, slots: Array) -> Array:
    # Numbers of 16 bits are written as integers: XLA for CPUs would make float32 of a whole cache
    # of them, and back.
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (cached, new))
    return jax.lax.bitcast_convert_type(write(*bits, slots), cached.dtype)


@_as_bits.defjvp
def _differentiate(write, primals, tangents):
    slots = primals[2]
    change = jax.jvp(lambda *arrays: write(*arrays, slots), primals[:2], tangents[:2])[1]
    return _as_bits(write, *primals), change
