"""Attention on one device that has a part of the tokens.

Keys are gathered or passed on, or heads are divided instead of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

import jax
import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.backends.call import Call
from flax_attn.backends.choose import choose, for_parts
from flax_attn.functional.mask_part import MaskPart, PlacedPart
from flax_attn.functional.masks import Mask
from flax_attn.functional.token_runs import Places
from flax_attn.sharding.partition import Division
from flax_attn.sharding.ring import attend_pieces
from flax_attn.sharding.ring_schedule import Route, make_route, stay
from flax_attn.sharding.shards import Shard
from flax_attn.sharding.zigzag_order import exchange, exchange_back, joined, unjoined, zigzag_places


@dataclass(frozen=True)
class Kernel:
    """The kernel that computes attention once the tokens that it needs are there.

    Args:
        backend: name of a backend, or `"auto"`.
    """

    backend: str = "auto"

    def attend(self, call: Call) -> Array:
        """Return the output of a call over all keys."""
        return choose(call, self.backend).attend(call)

    def attend_pieces(self, route: Route, shard: Shard, over: tuple[str, ...] = ()) -> Array:
        """Return the output of a device's queries over keys that lie on several devices."""
        return attend_pieces(for_parts(shard.as_call()), route, shard, over)


def attend_shard(division: Division, kernel: Kernel, shard: Shard) -> Array:
    """Return the output of one device's queries; in `jax.shard_map`."""
    if division.strategy == "local":
        return kernel.attend(shard.as_call())
    if division.strategy == "merge":
        return _over_all_devices(division, kernel, shard)
    if division.balanced and not division.ordered:
        output = _over_tokens(replace(division, ordered=True), kernel, _exchanged(division, shard))
        return exchange_back(output, division.keys)
    return _over_tokens(division, kernel, shard)


def _exchanged(division: Division, shard: Shard) -> Shard:
    call, bias, axes = shard.call, shard.call.bias, division.keys
    arrays = {name: exchange(getattr(call, name), axes) for name in ("query", "key", "value")}
    if bias is not None and bias.shape[2] > 1:
        bias = exchange(bias, axes, 2)
    places = zigzag_places(axes, call.shape[2])
    return replace(shard, call=replace(call, **arrays, bias=bias), rows=places, cols=places)


def _over_tokens(division: Division, kernel: Kernel, shard: Shard) -> Array:
    if division.strategy == "all_gather":
        return kernel.attend(_with_all_keys(division, shard).as_call())
    if division.strategy == "ring":
        return _around_the_ring(division, kernel, shard)
    divided = _with_all_tokens(division, shard)
    if _whole(division):
        return _to_tokens(division, kernel.attend(divided.as_call()))
    return _to_tokens(division, _around_the_ring(division, kernel, divided))


def _around_the_ring(division: Division, kernel: Kernel, shard: Shard) -> Array:
    _, _, t, s = shard.call.shape
    size = division.size(division.keys) // division.within
    route = make_route(
        division.keys, size, division.within, division.ordered, shard.call.mask, t, s
    )
    return kernel.attend_pieces(route, shard)


def _over_all_devices(division: Division, kernel: Kernel, shard: Shard) -> Array:
    # Every device has the same few queries, and its own keys, which stay where they are.
    route = stay(division.keys, division.size(division.keys), shard.call.shape[3])
    return kernel.attend_pieces(route, shard, division.keys)


def _whole(division: Division) -> bool:
    return division.within == division.size(division.keys)


def _with_all_keys(division: Division, shard: Shard) -> Shard:
    axes = division.keys
    key, value = (
        jax.lax.all_gather(x, axes, axis=1, tiled=True) for x in (shard.call.key, shard.call.value)
    )
    if division.ordered:
        key, value = (joined(x, division.size(axes)) for x in (key, value))
    return replace(shard, call=replace(shard.call, key=key, value=value), cols=None)


def _with_all_tokens(division: Division, shard: Shard) -> Shard:
    """Return a shard with all tokens of `within` neighbours and a share of their heads."""
    call, within = shard.call, division.within
    copies = within // gcd(call.key.shape[2], within)
    key, value = (
        jnp.repeat(x, copies, axis=2) if copies > 1 else x for x in (call.key, call.value)
    )
    query, key, value = (_to_heads(division, x, 2, 1) for x in (call.query, key, value))
    n = query.shape[2]
    heads = Places((jax.lax.axis_index(division.keys) % within * n)[None], n)
    parts = (
        PlacedPart(part, n=heads) if _differs_by_head(part) else part for part in call.mask.parts
    )
    bias = None if call.bias is None else _bias_of_heads(division, call.bias, call.shape[2], heads)
    call = replace(
        call,
        query=query,
        key=key,
        value=value,
        bias=bias,
        score=None if call.score is None else replace(call.score, n=heads.take(call.score.n, 0)),
        mask=Mask(tuple(parts)),
        **_of_heads(call, heads),
    )
    rows, cols = (
        None if _whole(division) else _group_places(division, x.shape[1]) for x in (query, key)
    )
    own = {"n": Places(shard.n.starts + heads.starts, n), "rows": rows, "cols": cols}
    return replace(shard, call=call, **own)


def _of_heads(call: Call, heads: Places) -> dict[str, Array]:
    """Return the arrays of a call that have an axis of heads and none of tokens, at `heads`."""
    found = {}
    for name, axes in call.axes.items():
        array = getattr(call, name)
        if array is not None and "heads" in axes and not {"queries", "keys"} & {*axes}:
            found[name] = heads.take(array, axes.index("heads"))
    return found


def _differs_by_head(part: MaskPart) -> bool:
    return part.axes is None or any("heads" in axes for axes in part.axes.values())


def _bias_of_heads(division: Division, bias: Array, t: int, heads: Places) -> Array:
    if bias.shape[2] < t:  # one row for all queries
        return heads.take(bias, 1)
    if bias.shape[1] > 1:
        return _to_heads(division, bias, 1, 2)
    axes, groups = division.keys, _groups(division)
    gathered = jax.lax.all_gather(bias, axes, axis=2, tiled=True, axis_index_groups=groups)
    return joined(gathered, division.within, 2) if division.ordered else gathered


def _group_places(division: Division, size: int) -> Places:
    axes, within = division.keys, division.within
    if division.ordered:
        return zigzag_places(axes, size, within)
    return Places((jax.lax.axis_index(axes) // within * size)[None], size)


def _groups(division: Division) -> list[list[int]] | None:
    devices, within = division.size(division.keys), division.within
    return (
        None
        if _whole(division)
        else [[*range(first, first + within)] for first in range(0, devices, within)]
    )


def _to_heads(division: Division, x: Array, heads: int, tokens: int) -> Array:
    x = jax.lax.all_to_all(
        x, division.keys, heads, tokens, tiled=True, axis_index_groups=_groups(division)
    )
    return joined(x, division.within, tokens) if division.ordered else x


def _to_tokens(division: Division, x: Array) -> Array:
    x = unjoined(x, division.within) if division.ordered else x
    return jax.lax.all_to_all(
        x, division.keys, 1, 2, tiled=True, axis_index_groups=_groups(division)
    )
