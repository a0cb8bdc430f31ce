"""The cache of keys and values: a plain value, passed in and returned, never hidden in a module."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Integer
from torch import Tensor

from attn_spec.cache_checks import check_cache_dtype, check_fits, check_lengths, check_ring_buffer
from attn_spec.checks import check_positive
from torch_ref.functional.cache_base import Cache
from torch_ref.functional.mask_part import Count
from torch_ref.functional.masks import Mask, as_mask
from torch_ref.functional.shapes import ArrayLike, Key, Value


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

    Raises:
        ValueError: if tokens do not fit, a mask is not that of the whole sequence, or the capacity
            is less than the window.

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
        check_cache_dtype(str(dtype).removeprefix("torch."))
        batch = () if b is None else (b,)
        widths = head_dim, head_dim if value_dim is None else value_dim
        size, numerics = (*batch, num_kv_heads, capacity), {"dtype": dtype, "device": device}
        keys, values = (torch.zeros(*size, width, **numerics) for width in widths)
        return KVCache(keys, values, torch.zeros(batch, dtype=torch.long, device=device), window)

    @property
    def batch(self) -> tuple[int, ...]:
        """The shape of the batch: `(b,)`, or `()` of one sequence."""
        return tuple(self.key.shape[:-3])

    @property
    def capacity(self) -> int:
        """How many tokens fit."""
        return self.key.shape[-2]

    @property
    def key_positions(self) -> Integer[Tensor, "*b s"]:
        """The position in its sequence of the key in each slot; -1 where there is none."""
        lengths = self.row_lengths[..., None]
        slots = torch.arange(self.capacity, device=lengths.device).expand(
            *lengths.shape[:-1], self.capacity
        )
        # Of the positions that share a slot of a ring buffer, the last one is cached.
        positions = (
            slots + (lengths - 1 - slots) // self.capacity * self.capacity if self.window else slots
        )
        return torch.where((positions >= 0) & (positions < lengths), positions, -1)

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
        mask: Mask | Tensor | None = None,
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
        after = self.append(key, value, lengths)
        return self._attend(
            key.shape[1], *after._tokens_first(key.dtype), mask, after.key_positions, after
        )

    def _extend_ring_buffer(
        self, key: Key, value: Value, mask: Mask, lengths: ArrayLike | int | None, window: int
    ) -> Extended:
        t, after = key.shape[1], self.append(key, value, lengths)
        mask = mask & Mask.sliding_window(window)
        if t <= self.capacity - window + 1:
            (keys, values), positions = after._tokens_first(key.dtype), after.key_positions
        else:
            # The last new tokens overwrite keys that the first new queries attend to.
            pairs = zip(self._tokens_first(key.dtype), (key, value), strict=True)
            keys, values = (torch.cat(pair, dim=1) for pair in pairs)
            new = self.positions(t)
            new = torch.where(new < rearrange(after.row_lengths, "b -> b 1"), new, -1)
            positions = torch.cat([self.key_positions, new], dim=1)
        return self._attend(t, keys, values, mask, positions, after)

    def _attend(
        self, t: int, keys: Key, values: Value, mask: Mask, positions: Tensor, after: KVCache
    ) -> Extended:
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
        new = torch.as_tensor(new, device=cached.device).expand(cached.shape)
        valid = (cached >= 0) & (new >= 0) & (new <= t)
        valid = valid if self.window else valid & (cached + new <= self.capacity)
        return torch.where(valid, cached + new, -1), torch.where(valid, new, 0)

    def _write(self, cached: Tensor, new: Tensor, count: Count) -> Tensor:
        t, new = new.shape[1], new.to(cached.dtype)
        i = torch.arange(t, device=new.device)[None]
        count = torch.as_tensor(count, device=new.device).expand(len(new))[:, None]
        slots = self.positions(t)
        if self.window is not None:
            slots = torch.where(i >= count - self.capacity, slots % self.capacity, self.capacity)
        slots = torch.where(i < count, slots, self.capacity)
        # The last slot is for what is not stored.
        written = torch.cat([cached, torch.zeros_like(cached[:, :, :1])], dim=2)
        written[torch.arange(len(new))[:, None], :, slots] = new
        return written[:, :, :-1]

    def _tokens_first(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key, value = (rearrange(x.to(dtype), "b k s h -> b s k h") for x in (self.key, self.value))
        return key, value

    def _batched(self) -> KVCache:
        length = self.length if isinstance(self.length, int) else self.length[None]
        return replace(self, key=self.key[None], value=self.value[None], length=length)

    def _unbatched(self) -> KVCache:
        return replace(self, key=self.key[0], value=self.value[0], length=self.row_lengths[0])
