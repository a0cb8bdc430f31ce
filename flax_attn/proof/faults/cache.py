"""Faults of computing in steps with a cache of keys and values: all at once nothing is wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from einops import pack

import torch_ref
from flax_attn.proof.faults.fault import Plant, fault
from flax_attn.proof.faults.formulas import Formula
from torch_ref.functional.cache import KVCache
from torch_ref.functional.masks import Mask
from torch_ref.functional.positions import RoPE
from torch_ref.models.gpt2 import GPT2

WINDOW, ROLLING_CAPACITY = 2, 3
_INPUTS = {"query": (3, 5, 4, 6), "key": (3, 5, 2, 6), "value": (3, 5, 2, 6)}
_FIRST = np.array([3, 1, 2])  # how many tokens of each row come in the first call
_SECOND = _FIRST[:, None] + np.arange(4)
_ORDER = np.where(np.arange(5) < _FIRST[:, None], np.arange(5), 3 + np.arange(5) - _FIRST[:, None])


def _causal(package, **tensors):
    return {"output": package.dot_product_attention(**tensors, mask=package.Mask.causal())}


def _ragged(package, query, key, value):
    cache, outputs, rows = package.KVCache.zeros(3, 8, 2, 6, dtype=query.dtype), [], np.arange(3)[:, None]
    for lengths, where in ((_FIRST, np.arange(3)[None]), (5 - _FIRST, np.minimum(_SECOND, 4))):
        held = cache.extend(key[rows, where], value[rows, where], package.Mask.causal(), lengths)
        outputs.append(package.dot_product_attention(query[rows, where], held.key, held.value, mask=held.mask))
        cache = held.cache
    return {"output": pack(outputs, "b * n h")[0][rows, _ORDER]}


def _sliding(package, **tensors):
    return {"output": package.dot_product_attention(**tensors, mask=package.Mask.sliding_window(WINDOW))}


def _rolling(package, query, key, value):
    cache, outputs = package.KVCache.zeros(3, ROLLING_CAPACITY, 2, 6, window=WINDOW, dtype=query.dtype), []
    for now in (slice(0, 2), slice(2, 4), slice(4, 5)):
        held = cache.extend(key[:, now], value[:, now])
        outputs.append(package.dot_product_attention(query[:, now], held.key, held.value, mask=held.mask))
        cache = held.cache
    return {"output": pack(outputs, "b * n h")[0]}


RAGGED = Formula("ragged_cache", _INPUTS, _causal, _ragged)
ROLLING = Formula("rolling_cache", _INPUTS, _sliding, _rolling)


@fault("multi_head_rope", check="cache = full")
def cached_before_turned(plant: Plant) -> None:
    """Keys are cached before RoPE turns them."""

    def extend(original, cache, key, *rest):
        return original(cache, plant.module.rope(key, -cache.positions(key.shape[1])), *rest)

    plant.wrap(KVCache, "extend", extend)


@fault("multi_head_rope", check="cache = full")
def rope_restarts(plant: Plant) -> None:
    """Under a cache, RoPE counts from 0 in every step."""
    plant.wrap(RoPE, "__call__", lambda turn, rope, x, positions: turn(rope, x))


@fault("gpt2", check="cache = full")
def learned_positions_restart(plant: Plant) -> None:
    """Under a cache, learned positions count from 0."""

    def embed(original, model, tokens, positions, key):
        return original(model, tokens, torch.arange(tokens.shape[-1]), key)

    plant.wrap(GPT2, "embed", embed)


@fault("multi_head_alibi", check="cache = full")
def alibi_restarts(plant: Plant) -> None:
    """Under a cache, ALiBi counts queries from 0."""

    def alibi(original, num_heads, query, key):
        return original(num_heads, torch.arange(query.shape[-1]).expand_as(query), key)

    plant.wrap(torch_ref, "alibi", alibi)


@fault("multi_head_causal", check="cache = full")
def cached_causal_one_too_far(plant: Plant) -> None:
    """Under a cache, queries see one token ahead."""
    plant.wrap(Mask, "at", lambda at, mask, rows, cols: at(mask, rows + 1, cols))


@fault("multi_head_causal", check="cache = full")
def cached_causal_one_too_short(plant: Plant) -> None:
    """Under a cache, queries do not see themselves."""
    plant.wrap(Mask, "at", lambda at, mask, rows, cols: at(mask, rows - 1, cols))


@fault("multi_head_causal", check="cache = full")
def cached_causal_of_the_first_query(plant: Plant) -> None:
    """In a chunk, all queries see what the first does."""
    plant.wrap(Mask, "at", lambda at, mask, rows, cols: at(mask, rows[:, :1].expand_as(rows), cols))


@fault("multi_head_causal", check="cache = full")
def chunk_sees_its_future(plant: Plant) -> None:
    """In a chunk, queries see each other's future."""
    plant.wrap(Mask, "at", lambda at, mask, rows, cols: at(mask, rows.amax(1, keepdim=True).expand_as(rows), cols))


@fault(RAGGED, check="cache = full")
def padding_is_stored(plant: Plant) -> None:
    """The padding of shorter rows is cached too."""
    plant.wrap(KVCache, "append", lambda append, cache, key, value, lengths: append(cache, key, value))


@fault(RAGGED, check="cache = full")
def rows_as_the_longest(plant: Plant) -> None:
    """Queries of every row stand where the longest does."""

    def positions(original, cache, *sizes):
        return original(replace(cache, length=cache.length.max()), *sizes)

    plant.wrap(KVCache, "positions", positions)


@fault(ROLLING, check="cache = full")
def rolling_slot_off_by_one(plant: Plant) -> None:
    """A cache that rolls writes one slot too far."""

    def write(original, cache, *rest):
        return original(replace(cache, length=cache.length + 1), *rest)

    plant.wrap(KVCache, "_write", write)


@fault(ROLLING, check="cache = full")
def slots_for_positions(plant: Plant) -> None:
    """Keys of a cache that rolls stand at their slots."""

    def key_positions(cache):
        return torch.arange(cache.capacity).expand(*cache.length.shape, -1)

    plant.replace(KVCache, "key_positions", property(key_positions))


@fault(ROLLING, check="cache = full")
def rolling_keeps_too_few(plant: Plant) -> None:
    """A cache that rolls shows one key too few."""

    def extend(original, cache, key, *rest):
        held, rows = original(cache, key, *rest), cache.positions(key.shape[1])
        kept = held.key_positions[:, None, None, :] > rows[:, None, :, None] - (WINDOW - 1)
        return held._replace(mask=held.mask & Mask.dense(kept))

    plant.wrap(KVCache, "extend", extend)
