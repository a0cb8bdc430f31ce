"""The cache of keys and values: a plain value, passed in and returned, never hidden in a module."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from torch_ref.functional.checks import check_lengths, check_positive, check_room, check_window
from torch_ref.functional.mask_parts import Count
from torch_ref.functional.masks import Mask, as_mask
from torch_ref.functional.shapes import ArrayLike, Key, Value


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
    key_positions: Integer[Tensor, "*b s"]
    cache: KVCache


@dataclass(frozen=True)
class KVCache:
    """The keys and values of the tokens so far, each row of the batch with its own number of them.

        held = cache.extend(key, value, Mask.causal())
        output = dot_product_attention(query, held.key, held.value, mask=held.mask)
        cache = held.cache

    What is passed in stays as it is. Keys are stored after rotation. With `window` it rolls: the slots of tokens that
    no later query sees are used again, and a sequence has no end. Without, tokens beyond the capacity are an error.

    Args:
        key: `(b, k, s, h)`, heads first, so that a step reads the keys of a head in one piece; s is the capacity.
        value: `(b, k, s, v)`.
        length: how many tokens each row holds or, in one that rolls, has seen: `(b,)`. An integer serves all rows.
        window: of a sliding window, how many keys in all a query sees; None keeps all.

    Shapes:
        All without b for one sequence.

    Raises:
        ValueError: if tokens do not fit, a mask is not that of the whole sequence, or the capacity is less than the
            window.

    Example:
        >>> cache = KVCache.zeros(2, 8, num_kv_heads=3, head_dim=4)
        >>> new = torch.ones((2, 5, 3, 4))
        >>> held = cache.extend(new, new, Mask.causal(), lengths=torch.tensor([5, 2]))
        >>> held.key.shape, held.cache.length.tolist()
        (torch.Size([2, 8, 3, 4]), [5, 2])
    """

    key: Float[Tensor, "*b k s h"]
    value: Float[Tensor, "*b k s v"]
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
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> KVCache:
        """Return an empty cache; b None is that of one sequence without a batch axis.

        One that rolls takes up to `capacity - window + 1` tokens a call in place, and more at the price of a copy.
        """
        check_positive(capacity=capacity, num_kv_heads=num_kv_heads, head_dim=head_dim)
        check_window(window, capacity)
        batch = () if b is None else (b,)
        size = (*batch, num_kv_heads, capacity, head_dim)
        keys, values = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
        return KVCache(keys, values, torch.zeros(batch, dtype=torch.long, device=device), window)

    @property
    def capacity(self) -> int:
        """How many tokens fit."""
        return self.key.shape[-2]

    @property
    def invalid(self) -> Bool[Tensor, "*b"]:
        """Which rows were given more tokens than fit: none, as that is an error."""
        return torch.zeros_like(self._lengths, dtype=torch.bool)

    @property
    def key_positions(self) -> Integer[Tensor, "*b s"]:
        """Where the key of each slot stands in its sequence; -1 where there is none."""
        slots, lengths = torch.arange(self.capacity, device=self.key.device), self._lengths[..., None]
        # Of the positions that share a slot, the last that is there.
        positions = slots + (lengths - 1 - slots) // self.capacity * self.capacity if self.window else slots
        return torch.where((positions >= 0) & (positions < lengths), positions, -1)

    def positions(self, t: int, lengths: ArrayLike | int | None = None) -> Integer[Tensor, "*b t"]:
        """Return where the next `t` tokens will stand in their sequences; 0 for padding, behind `lengths` of them."""
        held, ahead = self._lengths[..., None], torch.arange(t, device=self.key.device)
        if lengths is None:
            return held + ahead
        # Counted on, padding would leave tables of positions that have room for what is real.
        return torch.where(ahead < torch.as_tensor(lengths, device=held.device)[..., None], held + ahead, 0)

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
        new = torch.as_tensor(t if lengths is None else lengths, device=key.device).expand(len(key))
        check_lengths(max(new.tolist(), default=0), t)
        if self.window is None:
            for held, more in zip(self._lengths.tolist(), new.tolist(), strict=True):
                check_room(self.capacity, held, more)
        keys, values = (self._write(held, x, new) for held, x in ((self.key, key), (self.value, value)))
        return KVCache(keys, values, self._lengths + new, self.window)

    def extend(
        self, key: Key, value: Value, mask: Mask | Tensor | None = None, lengths: ArrayLike | int | None = None
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
        t, after, mask = key.shape[1], self.append(key, value, lengths), as_mask(mask)
        if self.window is None:
            mask.check_whole(self.capacity)
        else:
            mask = mask & Mask.sliding_window(self.window)
        if self.window is None or t <= self.capacity - self.window + 1:
            (keys, values), positions = after._tokens_first(key.dtype), after.key_positions
        else:  # the first of the new queries see keys that the last of the new tokens take the slots of
            rows = torch.where(self.positions(t) < after._lengths[:, None], self.positions(t), -1)
            keys, values = (
                torch.cat(pair, dim=1) for pair in zip(self._tokens_first(key.dtype), (key, value), strict=True)
            )
            positions = torch.cat([self.key_positions, rows], dim=1)
        visible = mask.at(self.positions(t, lengths), positions) & rearrange(positions >= 0, "b s -> b 1 1 s")
        return Extended(keys, values, Mask.dense(visible) & Mask.lengths(query=lengths), positions, after)

    @property
    def _lengths(self) -> Integer[Tensor, "*b"]:
        return torch.as_tensor(self.length, device=self.key.device).expand(self.key.shape[:-3])

    def _write(self, held: Tensor, new: Tensor, count: Tensor) -> Tensor:
        held = held.clone()
        for b, row in enumerate(new):
            kept = torch.arange(int(count[b]), device=row.device)[-self.capacity :]
            slots = (self._lengths[b] + kept) % self.capacity
            held[b, :, slots] = rearrange(row[kept], "t k h -> k t h").to(held.dtype)
        return held

    def _tokens_first(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key, value = (rearrange(x.to(dtype), "b k s h -> b s k h") for x in (self.key, self.value))
        return key, value

    def _batched(self) -> KVCache:
        length = self.length if isinstance(self.length, int) else self.length[None]
        return replace(self, key=self.key[None], value=self.value[None], length=length)

    def _unbatched(self) -> KVCache:
        return replace(self, key=self.key[0], value=self.value[0], length=self._lengths[0])
