"""Faults of computing in steps with a cache; without a cache nothing is wrong."""

from dataclasses import replace

import torch

import torch_ref
from flax_attn.proof.faults.fault import Patch, Wrap, fault
from torch_ref import GPT2, KVCache, Mask, RoPE

CHECK = "cache = full"
CAUSAL = "multi_head_causal"
ROPE = "multi_head_rope"
RAGGED = "multi_head_ragged"
# 2 keys in all, in 3 slots.
RING = "block_qwen_window"


def before_rotation(extend, cache, key, *others):
    """Store keys without their rotation."""
    return extend(cache, RoPE()(key, -cache.positions(key.shape[1])), *others)


def counted_from_0(embed, model, tokens, positions, key):
    """Embed tokens at the positions of a sequence that begins with them."""
    return embed(model, tokens, torch.arange(tokens.shape[-1]), key)


def queries_from_0(alibi, num_heads, query, key):
    """ALiBi with queries at the positions of a sequence that begins with them."""
    return alibi(num_heads, torch.arange(query.shape[-1]).expand_as(query), key)


def slots(cache):
    """The slot of each key."""
    return torch.arange(cache.capacity).expand(*cache.length.shape, -1)


FAULTS = (
    fault("cached_before_rotation", "Keys are cached before RoPE rotates them.", ROPE,
          Wrap(KVCache, "extend", before_rotation), check=CHECK),
    fault("rope_restarts", "With a cache, RoPE counts from 0 in every step.", ROPE,
          Wrap(RoPE, "__call__", lambda rotate, rope, x, where: rotate(rope, x)), check=CHECK),
    fault("learned_positions_restart",
          "With a cache, learned positions count from 0 in every step.", "gpt2",
          Wrap(GPT2, "embed", counted_from_0), check=CHECK),
    fault("alibi_restarts",
          "With a cache, ALiBi counts queries from 0 in every step.", "multi_head_alibi",
          Wrap(torch_ref, "alibi", queries_from_0), check=CHECK),
    fault("cached_causal_one_too_far", "With a cache, queries see one token ahead.", CAUSAL,
          Wrap(Mask, "at", lambda at, mask, rows, cols: at(mask, rows + 1, cols)), check=CHECK),
    fault("cached_causal_one_too_short", "With a cache, queries do not see themselves.", CAUSAL,
          Wrap(Mask, "at", lambda at, mask, rows, cols: at(mask, rows - 1, cols)), check=CHECK),
    fault("cached_causal_of_the_first_query",
          "In a chunk, all queries see what the first one does.", CAUSAL,
          Wrap(Mask, "at",
               lambda at, mask, rows, cols: at(mask, rows[:, :1].expand_as(rows), cols)),
          check=CHECK),
    fault("chunk_sees_its_future", "In a chunk, queries see the tokens after them.", CAUSAL,
          Wrap(Mask, "at",
               lambda at, mask, rows, cols: at(
                   mask, rows.amax(1, keepdim=True).expand_as(rows), cols)),
          check=CHECK),
    fault("padding_is_stored", "The padding of shorter rows is cached too.", RAGGED,
          Wrap(KVCache, "append",
               lambda append, cache, key, value, lengths: append(cache, key, value)), check=CHECK),
    fault("rows_as_the_longest",
          "Queries of every row are at the positions of the longest row.", RAGGED,
          Wrap(KVCache, "positions",
               lambda positions, cache, *sizes: positions(
                   replace(cache, length=cache.length.max()), *sizes)),
          check=CHECK),
    fault("ring_buffer_slot_off_by_one", "A ring buffer writes one slot too far.", RING,
          Wrap(KVCache, "_slots", lambda slots, cache, *others: slots(
              replace(cache, length=cache.length + 1), *others)), check=CHECK),
    fault("slots_for_positions", "Keys in a ring buffer are at the positions of their slots.", RING,
          Patch(KVCache, "key_positions", property(slots)), check=CHECK),
    fault("ring_buffer_shows_too_few", "A ring buffer shows one key too few.", RING,
          Wrap(KVCache, "_extend_ring_buffer",
               lambda extend, cache, *others: extend(cache, *others[:-1], 1)), check=CHECK),
)  # fmt: skip
