"""One attention call over a mesh, in `jax.shard_map`.

Each device computes its own rows, heads and tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.tree_util import SequenceKey
from jaxtyping import Array

from flax_attn.backends.call import Call
from flax_attn.functional.dropout import key_data
from flax_attn.functional.mask_part import PlacedPart
from flax_attn.functional.masks import Mask
from flax_attn.functional.token_runs import Places
from flax_attn.sharding.mapped import on_devices
from flax_attn.sharding.partition import Division
from flax_attn.sharding.shards import Shard
from flax_attn.sharding.strategies import Kernel, attend_shard
from flax_attn.sharding.zigzag_order import zigzag_places


def attend(division: Division, call: Call, kernel: Kernel) -> Array:
    """Return the output `(b, t, n, v)` of a call that is divided over a mesh.

    Each device computes its part with `kernel`.

    Raises:
        Unsupported: if the backend asked for by name cannot run its part of the call.
    """
    return _compiled(division, kernel, _divisible(division, call))


def _divisible(division: Division, call: Call) -> Call:
    """Return the same call, with arrays that the mesh divides."""
    bias = call.bias
    t = call.shape[2]
    if division.copies > 1:
        key = jnp.repeat(call.key, division.copies, axis=2)
        value = jnp.repeat(call.value, division.copies, axis=2)
        call = replace(call, key=key, value=value)
    if bias is not None and t == division.size(division.queries):
        # Of one query a device: one row is that query's, and not one for all.
        b, n, _, s = bias.shape
        bias = jnp.broadcast_to(bias, (b, n, t, s))
        call = replace(call, bias=bias)
    if call.dropout is not None:
        key = key_data(call.dropout.key)
        call = replace(call, dropout=replace(call.dropout, key=key))
    return call


# Compiled, since an eager call would compile its parts each time.
@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _compiled(division: Division, kernel: Kernel, call: Call) -> Array:
    def of_device(call: Call) -> Array:
        return attend_shard(division, kernel, _shard(division, call))

    specs = _specs(division, call)
    output = P(division.batch, division.queries, division.heads)
    return on_devices(of_device, division.mesh, call, specs, output, division.axes)


def _specs(division: Division, call: Call) -> Call:
    """Return how each array of a call is split: by the `axes` of its class, or not at all."""

    def spec(path: tuple, array: Array) -> P:
        # The path is walked down to the object whose class names the axes of the array.
        owner: Any = call
        for step in path[:-1]:
            is_item = isinstance(step, SequenceKey)
            owner = owner[step.idx] if is_item else getattr(owner, step.name)
            # A part of a mask that takes its heads of the whole by itself.
            if getattr(owner, "axes", {}) is None:
                return P()
        axes = getattr(owner, "axes", {})
        name = getattr(path[-1], "name", None)
        return _spec(division, axes[name], array) if name in axes else P()

    return jax.tree_util.tree_map_with_path(spec, call)


def _spec(division: Division, names: tuple[str | None, ...], array: Array) -> P:
    # Aligned at the last axis; an axis of one serves every index.
    split = {
        "batch": division.batch,
        "heads": division.heads,
        "queries": division.queries,
        "keys": division.keys,
        None: (),
    }
    own = names[len(names) - array.ndim :]
    entries = [split[name] for name in own]
    for axis, size in enumerate(array.shape):
        if size == 1:
            entries[axis] = ()
    return P(*entries)


def _shard(division: Division, call: Call) -> Shard:
    b, n, t, s = call.shape
    rows = _places(division.batch, b)
    heads = _places(division.heads, n)
    parts = []
    for part in call.mask.parts:
        # Its arrays are whole here: it is told which rows and heads these are.
        if part.axes is None:
            part = PlacedPart(part, b=rows, n=heads)
        parts.append(part)
    return Shard(
        call=replace(call, mask=Mask(tuple(parts))),
        b=rows,
        n=heads,
        rows=_token_places(division, t) if division.queries else None,
        cols=_token_places(division, s) if division.keys else None,
        s=s * division.size(division.keys),
    )


def _places(axes: tuple[str, ...], size: int) -> Places:
    start = jax.lax.axis_index(axes) * size if axes else jnp.int32(0)
    return Places(start[None], size)


def _token_places(division: Division, size: int) -> Places:
    # Queries are split as the keys are, or not at all.
    return zigzag_places(division.keys, size) if division.ordered else _places(division.keys, size)
