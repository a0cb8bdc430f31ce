"""The cache of keys and values: a plain value, passed in and returned, never hidden in a module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax.typing import Dtype
from jaxtyping import Array, Float, Integer

from attn_spec.cache_checks import check_new_tokens, check_ring_buffer
from attn_spec.checks import check_positive
from flax_attn.functional.cache_base import Cache, check_empty
from flax_attn.functional.cache_slots import token_slots, write_tokens
from flax_attn.functional.explicit_sharding import join
from flax_attn.functional.mask_part import Count
from flax_attn.functional.masks import Mask, as_mask
from flax_attn.functional.shapes import Key, RowLengths, Value


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
        check_empty(b, dtype)
        if value_dim is None:
            value_dim = head_dim
        batch = () if b is None else (b,)
        slots = (*batch, num_kv_heads, capacity)
        return KVCache(
            key=jnp.zeros((*slots, head_dim), dtype),
            value=jnp.zeros((*slots, value_dim), dtype),
            length=jnp.zeros(batch, jnp.int32),
            window=window,
        )

    @property
    def batch(self) -> tuple[int, ...]:
        """The shape of the batch: `(b,)`, or `()` of one sequence."""
        return self.key.shape[:-3]

    @property
    def capacity(self) -> int:
        """How many tokens fit."""
        return self.key.shape[-2]

    @property
    def limit(self) -> int | None:
        """How many tokens a sequence may have; None is any number."""
        # A ring buffer overwrites: its sequences have no end.
        return self.capacity if self.window is None else None

    @property
    def key_positions(self) -> Integer[Array, "*b s"]:
        """The position in its sequence of the key in each slot; -1 where there is none."""
        positions = self._latest_positions()
        cached = (positions >= 0) & (positions < self.row_lengths[..., None])
        return jnp.where(cached, positions, -1)

    def _latest_positions(self) -> Integer[Array, "*b s"]:
        """Return the last position before the end of its row that falls on each slot."""
        slots = self.indices(self.capacity)
        if self.window is None:
            return slots
        # The last turn of the ring that fell on a slot; below 0 where no token did.
        behind = self.row_lengths[..., None] - 1 - slots
        return slots + behind // self.capacity * self.capacity

    def check_heads(
        self, batch: tuple[int, ...], num_kv_heads: int, head_dim: int, value_dim: int
    ) -> None:
        """Raise unless the cache is floating point and fits these rows, heads and widths."""
        heads = (*batch, num_kv_heads, self.capacity)
        self.check_shapes({"key": (*heads, head_dim), "value": (*heads, value_dim)})

    def append(self, key: Key, value: Value, lengths: RowLengths = None) -> KVCache:
        """Return the cache with new tokens behind the cached ones.

        Args:
            key: `(b, t, k, h)`, rotated by its positions already.
            value: `(b, t, k, v)`.
            lengths: how many of the new tokens of each row are real, `(b,)`; the rest is padding
                and is not stored. None is all.
        """
        self._check_new(key, value)
        # One sequence is a batch of one.
        if key.ndim == 3:
            batched = self._batched().append(key[None], value[None], lengths)
            return batched._unbatched()
        t = key.shape[1]
        length, stored = self.count(t, lengths)
        slots = self._slots(t, stored)
        keys = write_tokens(self.key, key, slots)
        values = write_tokens(self.value, value, slots)
        return KVCache(key=keys, value=values, length=length, window=self.window)

    def extend(
        self,
        key: Key,
        value: Value,
        mask: Mask | Array | None = None,
        lengths: RowLengths = None,
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
        self._check_new(key, value)
        # One sequence is a batch of one.
        if key.ndim == 3:
            extended = self._batched().extend(key[None], value[None], mask, lengths)
            return Extended(
                key=extended.key[0],
                value=extended.value[0],
                mask=extended.mask,
                key_positions=extended.key_positions[0],
                cache=extended.cache._unbatched(),
            )
        mask = as_mask(mask)
        if self.window is None:
            extended = self._extend(key, value, mask, lengths)
        else:
            extended = self._extend_ring_buffer(key, value, mask, lengths, self.window)
        return extended._replace(mask=extended.mask & Mask.lengths(query=lengths))

    def _extend(self, key: Key, value: Value, mask: Mask, lengths: RowLengths) -> Extended:
        # The rows of the new tokens are taken from it, wherever they stand.
        mask.check_whole(self.capacity)
        t = key.shape[1]
        after = self.append(key, value, lengths)
        s = self.capacity
        if isinstance(self.length, int):
            # Where it is known how many tokens there are, the slots behind them cost nothing.
            s = min(self.length + t, s)
        keys, values = after._tokens_first(key.dtype)
        return Extended(
            key=keys[:, :s],
            value=values[:, :s],
            mask=mask.shift(self.length, t, s) & Mask.lengths(key=after.length),
            key_positions=after.key_positions[:, :s],
            cache=after,
        )

    def _extend_ring_buffer(
        self, key: Key, value: Value, mask: Mask, lengths: RowLengths, window: int
    ) -> Extended:
        t = key.shape[1]
        after = self.append(key, value, lengths)
        mask = mask & Mask.sliding_window(window)
        if isinstance(self.length, int) and self.length == 0:
            # Without older keys the structure of the mask is kept.
            return Extended(
                key=key,
                value=value,
                mask=mask.shift(0, t, t) & Mask.lengths(key=lengths),
                key_positions=self.indices(t),
                cache=after,
            )
        keys, values, positions = self._ring_tokens(key, value, after, window)
        visible = mask.at(self.positions(t), positions)
        cached = rearrange(positions >= 0, "b s -> b 1 1 s")
        return Extended(
            key=keys,
            value=values,
            mask=Mask.dense(visible & cached),
            key_positions=positions,
            cache=after,
        )

    def _ring_tokens(
        self, key: Key, value: Value, after: KVCache, window: int
    ) -> tuple[Array, Array, Array]:
        """Return the keys and values that new tokens may see, and their positions."""
        if key.shape[1] <= self.capacity - window + 1:
            keys, values = after._tokens_first(key.dtype)
            return keys, values, after.key_positions
        return self._joined(key, value, after)

    def _joined(self, key: Key, value: Value, after: KVCache) -> tuple[Array, Array, Array]:
        """Return the cached tokens and the new ones, and the positions of them all.

        More new tokens than fit beside a window overwrite keys that the first of them attend to.
        """
        old_keys, old_values = self._tokens_first(key.dtype)
        keys = join(old_keys, key, axis=1)
        values = join(old_values, value, axis=1)
        positions = self._joined_positions(key.shape[1], after)
        return keys, values, positions

    def _joined_positions(self, t: int, after: KVCache) -> Array:
        new = self.positions(t)
        real = new < rearrange(after.row_lengths, "b -> b 1")
        # Padding stands nowhere, and no query sees it.
        new = jnp.where(real, new, -1)
        return jnp.concatenate([self.key_positions, new], axis=1)

    def _check_new(self, key: Key, value: Value) -> None:
        check_new_tokens(tuple(key.shape), tuple(value.shape))
        *batch, _, num_kv_heads, head_dim = key.shape
        self.check_heads(tuple(batch), num_kv_heads, head_dim, value.shape[-1])

    def _slots(self, t: int, count: Count) -> Array | int:
        """Return the slot of each new token, or of the first where they follow it in every row.

        The first `count` tokens of a row are stored; the slot `capacity` is of those that are not.
        """
        # The same for all rows, and no slot is written twice: one slice takes them all.
        if isinstance(self.length, int) and self.length + t <= self.capacity:
            return self.length
        count = self.each_row(count)
        return token_slots(self.positions(t), count, self.capacity, ring=self.window is not None)

    def _tokens_first(self, dtype: Dtype) -> tuple[Key, Value]:
        key = rearrange(self.key.astype(dtype), "b k s h -> b s k h")
        value = rearrange(self.value.astype(dtype), "b k s h -> b s k h")
        return key, value

    def _batched(self) -> KVCache:
        return jax.tree.map(lambda x: x[None], self)

    def _unbatched(self) -> KVCache:
        return jax.tree.map(lambda x: x[0], self)
