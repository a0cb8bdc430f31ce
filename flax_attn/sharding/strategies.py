"""Attention on one device that has a part of the tokens.

Keys are gathered or passed on, or heads are divided instead of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from flax_attn.backends import derivatives
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
        return derivatives.attend(choose(call, self.backend), call)

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
    # Its rows are of the device's queries; its columns are of all keys, in their own order.
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
        output = kernel.attend(divided.as_call())
    else:
        output = _around_the_ring(division, kernel, divided)
    return _to_tokens(division, output)


def _around_the_ring(division: Division, kernel: Kernel, shard: Shard) -> Array:
    _, _, t, s = shard.call.shape
    axes, within, ordered = division.keys, division.within, division.ordered
    size = division.size(axes) // within
    route = make_route(axes, size, within, ordered, shard.call.mask, t, s)
    return kernel.attend_pieces(route, shard)


def _over_all_devices(division: Division, kernel: Kernel, shard: Shard) -> Array:
    # Every device has the same few queries, and its own keys, which stay where they are.
    route = stay(division.keys, division.size(division.keys), shard.call.shape[3])
    return kernel.attend_pieces(route, shard, division.keys)


def _whole(division: Division) -> bool:
    return division.within == division.size(division.keys)


def _with_all_keys(division: Division, shard: Shard) -> Shard:
    axes = division.keys

    def gather(x: Array) -> Array:
        x = jax.lax.all_gather(x, axes, axis=1, tiled=True)
        return joined(x, division.size(axes)) if division.ordered else x

    call = shard.call
    call = replace(call, key=gather(call.key), value=gather(call.value))
    return replace(shard, call=call, cols=None)


def _with_all_tokens(division: Division, shard: Shard) -> Shard:
    """Return a shard with all tokens of `within` neighbours and a share of their heads."""
    call, within, t = shard.call, division.within, shard.call.shape[2]
    key, value = call.key, call.value
    # Fewer heads than neighbours are copied, so that each neighbour gets one.
    copies = within // gcd(key.shape[2], within)
    if copies > 1:
        key = jnp.repeat(key, copies, axis=2)
        value = jnp.repeat(value, copies, axis=2)
    query = _to_heads(division, call.query, 2, 1)
    key = _to_heads(division, key, 2, 1)
    value = _to_heads(division, value, 2, 1)
    n = query.shape[2]
    first = jax.lax.axis_index(division.keys) % within * n
    heads = Places(first[None], n)
    parts = []
    for part in call.mask.parts:
        if _differs_by_head(part):
            part = PlacedPart(part, n=heads)
        parts.append(part)
    changes: dict[str, Any] = _of_heads(call, heads)
    if call.bias is not None:
        changes["bias"] = _bias_of_heads(division, call.bias, t, heads)
    if call.score is not None:
        changes["score"] = replace(call.score, n=heads.take(call.score.n, 0))
    call = replace(call, query=query, key=key, value=value, mask=Mask(tuple(parts)), **changes)
    rows = cols = None
    if not _whole(division):
        rows = _group_places(division, query.shape[1])
        cols = _group_places(division, key.shape[1])
    # `heads` counts among the heads of this device, and the shard among those of the call.
    n_places = Places(shard.n.starts + heads.starts, n)
    return replace(shard, call=call, n=n_places, rows=rows, cols=cols)


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
    # One head for all: there is nothing to exchange for the rows of the neighbours.
    axes, groups = division.keys, _groups(division)
    gathered = jax.lax.all_gather(bias, axes, axis=2, tiled=True, axis_index_groups=groups)
    return joined(gathered, division.within, 2) if division.ordered else gathered


def _group_places(division: Division, size: int) -> Places:
    axes, within = division.keys, division.within
    if division.ordered:
        return zigzag_places(axes, size, within)
    return Places((jax.lax.axis_index(axes) // within * size)[None], size)


def _groups(division: Division) -> list[list[int]] | None:
    if _whole(division):
        return None
    devices, within = division.size(division.keys), division.within
    return np.arange(devices).reshape(-1, within).tolist()


def _to_heads(division: Division, x: Array, heads: int, tokens: int) -> Array:
    axes, groups = division.keys, _groups(division)
    x = jax.lax.all_to_all(x, axes, heads, tokens, tiled=True, axis_index_groups=groups)
    return joined(x, division.within, tokens) if division.ordered else x


def _to_tokens(division: Division, x: Array) -> Array:
    axes, groups = division.keys, _groups(division)
    if division.ordered:
        x = unjoined(x, division.within)
    return jax.lax.all_to_all(x, axes, 1, 2, tiled=True, axis_index_groups=groups)
