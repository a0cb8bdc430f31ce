"""The cache of keys and values: a plain value, passed in and returned, never hidden in a module."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Integer
from torch import Tensor

from attn_spec.cache_checks import check_new_tokens, check_ring_buffer
from attn_spec.checks import check_positive
from torch_ref.functional.cache_base import Cache, check_empty
from torch_ref.functional.cache_slots import token_slots, write_tokens
from torch_ref.functional.mask_part import Count
from torch_ref.functional.masks import Mask, as_mask
from torch_ref.functional.shapes import Key, RowLengths, Value


class Extended(NamedTuple):
    """What the queries of new tokens attend to, and the cache after them.

    Args:
        key: `(b, s, k, h)`.
        value: `(b, s, k, v)`.
        mask: mask of the queries of the new tokens over these keys.
        key_positions: `(b, s)`, the position of each key in its sequence; -1 where there is none.
        cache: cache with the new tokens.
    """

    key: Key
    value: Value
    mask: Mask
    key_positions: Integer[Tensor, "*b s"]
    cache: KVCache


@dataclass(frozen=True)
class KVCache(Cache):
    """The keys and values of the tokens so far, each row of the batch with its own number of them.

        extended = cache.extend(key, value, Mask.causal())
        output = dot_product_attention(query, extended.key, extended.value, mask=extended.mask)
        cache = extended.cache

    What is passed in stays as it is. Keys are stored after rotation. With `window` it is a ring
    buffer: new tokens overwrite those that no later query attends to, and a sequence has no end.

    Tokens that do not fit are an error where their number is known from shapes and Python integers.
    Arrays are not read, so that no call waits for the device: a row that is given more tokens than
    fit, or a length outside `0 ... t`, becomes `invalid`. It stores nothing more, and modules turn
    its output into NaN.

    Args:
        key: `(b, k, s, h)`, heads first, so that a step reads the keys of a head in one piece; s is
            the capacity.
        value: `(b, k, s, v)`.
        length: how many tokens of each row were cached, `(b,)`; -1 in a row that is invalid. An
            integer is for all rows.
        window: width of a sliding window, the number of keys that a query attends to; None keeps
            all.

    Shapes:
        All without b for one sequence.

    Example:
        >>> cache = KVCache.zeros(2, 8, num_kv_heads=3, head_dim=4)
        >>> new = torch.ones((2, 5, 3, 4))
        >>> extended = cache.extend(new, new, Mask.causal(), lengths=torch.tensor([5, 2]))
        >>> extended.key.shape, extended.cache.length.tolist()
        (torch.Size([2, 8, 3, 4]), [5, 2])
    """

    key: Float[Tensor, "*b k s h"]
    value: Float[Tensor, "*b k s v"]
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
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
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
            key=torch.zeros((*slots, head_dim), dtype=dtype, device=device),
            value=torch.zeros((*slots, value_dim), dtype=dtype, device=device),
            length=torch.zeros(batch, dtype=torch.long, device=device),
            window=window,
        )

    @property
    def batch(self) -> tuple[int, ...]:
        """The shape of the batch: `(b,)`, or `()` of one sequence."""
        return tuple(self.key.shape[:-3])

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
    def key_positions(self) -> Integer[Tensor, "*b s"]:
        """The position in its sequence of the key in each slot; -1 where there is none."""
        positions = self._latest_positions()
        cached = (positions >= 0) & (positions < self.row_lengths[..., None])
        return torch.where(cached, positions, -1)

    def _latest_positions(self) -> Integer[Tensor, "*b s"]:
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
        """Return the cache with new tokens behind the cached ones."""
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
        mask: Mask | Tensor | None = None,
        lengths: RowLengths = None,
    ) -> Extended:
        """Return what the queries of new tokens attend to, and the cache after them."""
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
        after = self.append(key, value, lengths)
        keys, values = after._tokens_first(key.dtype)
        return self._attend(key.shape[1], keys, values, mask, after.key_positions, after)

    def _extend_ring_buffer(
        self, key: Key, value: Value, mask: Mask, lengths: RowLengths, window: int
    ) -> Extended:
        after = self.append(key, value, lengths)
        mask = mask & Mask.sliding_window(window)
        keys, values, positions = self._ring_tokens(key, value, after, window)
        return self._attend(key.shape[1], keys, values, mask, positions, after)

    def _attend(
        self, t: int, keys: Key, values: Value, mask: Mask, positions: Tensor, after: KVCache
    ) -> Extended:
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the keys and values that new tokens may see, and their positions."""
        if key.shape[1] <= self.capacity - window + 1:
            keys, values = after._tokens_first(key.dtype)
            return keys, values, after.key_positions
        return self._joined(key, value, after)

    def _joined(self, key: Key, value: Value, after: KVCache) -> tuple[Tensor, Tensor, Tensor]:
        """Return the cached tokens and the new ones, and the positions of them all.

        More new tokens than fit beside a window overwrite keys that the first of them attend to.
        """
        old_keys, old_values = self._tokens_first(key.dtype)
        keys = torch.cat([old_keys, key], dim=1)
        values = torch.cat([old_values, value], dim=1)
        positions = self._joined_positions(key.shape[1], after)
        return keys, values, positions

    def _joined_positions(self, t: int, after: KVCache) -> Tensor:
        new = self.positions(t)
        real = new < rearrange(after.row_lengths, "b -> b 1")
        # Padding stands nowhere, and no query sees it.
        new = torch.where(real, new, -1)
        return torch.cat([self.key_positions, new], dim=1)

    def _check_new(self, key: Key, value: Value) -> None:
        check_new_tokens(tuple(key.shape), tuple(value.shape))
        *batch, _, num_kv_heads, head_dim = key.shape
        self.check_heads(tuple(batch), num_kv_heads, head_dim, value.shape[-1])

    def _slots(self, t: int, count: Count) -> Tensor:
        """Return the slot of each new token.

        The first `count` tokens of a row are stored; the slot `capacity` is of those that are not.
        """
        count = self.each_row(count)
        return token_slots(self.positions(t), count, self.capacity, ring=self.window is not None)

    def _tokens_first(self, dtype: torch.dtype) -> tuple[Key, Value]:
        key = rearrange(self.key.to(dtype), "b k s h -> b s k h")
        value = rearrange(self.value.to(dtype), "b k s h -> b s k h")
        return key, value

    def _batched(self) -> KVCache:
        length = self.length if isinstance(self.length, int) else self.length[None]
        return replace(self, key=self.key[None], value=self.value[None], length=length)

    def _unbatched(self) -> KVCache:
        return replace(self, key=self.key[0], value=self.value[0], length=self.row_lengths[0])
