"""Attention on one device that has a part of the tokens.

Keys are gathered or passed on, or heads are divided instead of tokens.
"""

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
        ordered = replace(division, ordered=True)
        output = _over_tokens(ordered, kernel, _exchanged(division, shard))
        return exchange_back(output, division.keys)
    return _over_tokens(division, kernel, shard)


def _exchanged(division: Division, shard: Shard) -> Shard:
    call, axes = shard.call, division.keys
    changes = {name: exchange(getattr(call, name), axes) for name in ("query", "key", "value")}
    # Its rows are of the device's queries; its columns are of all keys, in their own order.
    if call.bias is not None and call.bias.shape[2] > 1:
        changes["bias"] = exchange(call.bias, axes, 2)
    places = zigzag_places(axes, call.query.shape[1])
    return replace(shard, call=replace(call, **changes), rows=places, cols=places)


def _over_tokens(division: Division, kernel: Kernel, shard: Shard) -> Array:
    if division.strategy == "all_gather":
        gathered = _with_all_keys(division, shard)
        return kernel.attend(gathered.as_call())
    if division.strategy == "ring":
        return _around_the_ring(division, kernel, shard)
    divided = _with_all_tokens(division, shard)
    # Ulysses alone, or a ring of groups of neighbours.
    if division.heads_alone:
        output = kernel.attend(divided.as_call())
    else:
        output = _around_the_ring(division, kernel, divided)
    return _to_tokens(division, output)


def _around_the_ring(division: Division, kernel: Kernel, shard: Shard) -> Array:
    _, _, t, s = shard.call.shape
    axes, within = division.keys, division.within
    size = division.size(axes) // within
    route = make_route(axes, size, within, division.ordered, shard.call.mask, t, s)
    return kernel.attend_pieces(route, shard)


def _over_all_devices(division: Division, kernel: Kernel, shard: Shard) -> Array:
    # Every device has the same few queries, and its own keys, which stay where they are.
    route = stay(division.keys, division.size(division.keys), shard.call.shape[3])
    return kernel.attend_pieces(route, shard, division.keys)


def _with_all_keys(division: Division, shard: Shard) -> Shard:

    def gather(x: Array) -> Array:
        x = jax.lax.all_gather(x, division.keys, axis=1, tiled=True)
        return _in_own_order(division, x, division.size(division.keys), 1)

    call = shard.call
    call = replace(call, key=gather(call.key), value=gather(call.value))
    return replace(shard, call=call, cols=None)


def _with_all_tokens(division: Division, shard: Shard) -> Shard:
    """Return a shard with all tokens of `within` neighbours and a share of their heads."""
    call = shard.call
    query, key, value = _exchanged_for_heads(division, call)
    n = query.shape[2]
    first = jax.lax.axis_index(division.keys) % division.within * n
    heads = Places(first[None], n)
    others = _of_heads(division, call, heads)
    call = replace(call, query=query, key=key, value=value, **others)
    rows = cols = None
    if not division.heads_alone:
        rows = _group_places(division, query.shape[1])
        cols = _group_places(division, key.shape[1])
    # `heads` counts among the heads of this device, and the shard among those of the call.
    n_places = Places(shard.n.starts + heads.starts, n)
    return replace(shard, call=call, n=n_places, rows=rows, cols=cols)


def _exchanged_for_heads(division: Division, call: Call) -> list[Array]:
    """Return query, key and value of all tokens of the neighbours, and a share of the heads."""
    # Fewer heads than neighbours are copied, so that each neighbour gets one.
    copies = division.within // gcd(call.key.shape[2], division.within)
    arrays = call.query, *copied_heads(call, copies)
    return [_to_heads(division, x, heads=2, tokens=1) for x in arrays]


def copied_heads(call: Call, copies: int) -> tuple[Array, Array]:
    """Return the keys and values of a call with so many copies of each head, side by side."""
    if copies == 1:
        return call.key, call.value
    return jnp.repeat(call.key, copies, axis=2), jnp.repeat(call.value, copies, axis=2)


def _of_heads(division: Division, call: Call, heads: Places) -> dict[str, Any]:
    """Return all else that a call has for each head, at `heads`."""
    found = _arrays_of_heads(call, heads) | {"mask": _mask_of_heads(call.mask, heads)}
    if call.bias is not None:
        found["bias"] = _bias_of_heads(division, call.bias, call.query.shape[1], heads)
    if call.score is not None:
        found["score"] = replace(call.score, n=heads.take(call.score.n, 0))
    return found


def _arrays_of_heads(call: Call, heads: Places) -> dict[str, Any]:
    """Return the arrays of a call that have an axis of heads and none of tokens, at `heads`."""
    found = {}
    for name, axes in call.axes.items():
        array = getattr(call, name)
        if array is not None and "heads" in axes and not {"queries", "keys"} & {*axes}:
            found[name] = heads.take(array, axes.index("heads"))
    return found


def _mask_of_heads(mask: Mask, heads: Places) -> Mask:
    parts = []
    for part in mask.parts:
        own = PlacedPart(part, n=heads) if _differs_by_head(part) else part
        parts.append(own)
    return Mask(tuple(parts))


def _differs_by_head(part: MaskPart) -> bool:
    # A part without axes takes its heads of the whole by itself.
    return part.axes is None or any("heads" in axes for axes in part.axes.values())


def _bias_of_heads(division: Division, bias: Array, t: int, heads: Places) -> Array:
    # One row for all queries.
    if bias.shape[2] < t:
        return heads.take(bias, 1)
    if bias.shape[1] > 1:
        return _to_heads(division, bias, heads=1, tokens=2)
    # One head for all: there is nothing to exchange for the rows of the neighbours.
    gathered = jax.lax.all_gather(bias, axis=2, **_among_neighbours(division))
    return _in_own_order(division, gathered, division.within, 2)


def _group_places(division: Division, size: int) -> Places:
    axes, within = division.keys, division.within
    if division.ordered:
        return zigzag_places(axes, size, within)
    return Places((jax.lax.axis_index(axes) // within * size)[None], size)


def _among_neighbours(division: Division) -> dict[str, Any]:
    """Return the options of a collective among the devices that divide the heads."""
    groups = None
    if not division.heads_alone:
        devices = np.arange(division.size(division.keys))
        groups = devices.reshape(-1, division.within).tolist()
    return {"axis_name": division.keys, "axis_index_groups": groups, "tiled": True}


def _to_heads(division: Division, x: Array, heads: int, tokens: int) -> Array:
    among = _among_neighbours(division)
    x = jax.lax.all_to_all(x, split_axis=heads, concat_axis=tokens, **among)
    return _in_own_order(division, x, division.within, tokens)


def _to_tokens(division: Division, x: Array) -> Array:
    among = _among_neighbours(division)
    if division.ordered:
        x = unjoined(x, division.within)
    return jax.lax.all_to_all(x, split_axis=1, concat_axis=2, **among)


def _in_own_order(division: Division, x: Array, devices: int, axis: int) -> Array:
    # Tokens that were gathered in zigzag order are those of one early and one late piece each.
    return joined(x, devices, axis) if division.ordered else x
