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
    bias, dropout, t = call.bias, call.dropout, call.shape[2]
    if division.copies > 1:
        key, value = (jnp.repeat(x, division.copies, axis=2) for x in (call.key, call.value))
        call = replace(call, key=key, value=value)
    if bias is not None and t == division.size(division.queries):
        # Of one query a device: one row is that query's, and not one for all.
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], t, bias.shape[3]))
    if dropout is not None:
        dropout = replace(dropout, key=key_data(dropout.key))
    return replace(call, bias=bias, dropout=dropout)


@partial(
    jax.jit, static_argnums=(0, 1), inline=True
)  # an eager call would compile its parts each time
def _compiled(division: Division, kernel: Kernel, call: Call) -> Array:
    return on_devices(
        lambda call: attend_shard(division, kernel, _shard(division, call)),
        division.mesh,
        call,
        _specs(division, call),
        P(division.batch, division.queries, division.heads),
        division.axes,
    )


def _specs(division: Division, call: Call) -> Call:
    """Return how each array of a call is split: by the `axes` of its class, or not at all."""

    def spec(path: tuple, array: Array) -> P:
        owner: Any = call
        for step in path[:-1]:
            owner = owner[step.idx] if isinstance(step, SequenceKey) else getattr(owner, step.name)
            if (
                getattr(owner, "axes", {}) is None
            ):  # a part of a mask that takes its heads of the whole by itself
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
    axes = zip(own, array.shape, strict=True)
    return P(*(() if size == 1 else split[name] for name, size in axes))


def _shard(division: Division, call: Call) -> Shard:
    b, n, t, s = call.shape
    rows, heads = _places(division.batch, b), _places(division.heads, n)
    parts = (
        part if part.axes is not None else PlacedPart(part, b=rows, n=heads)
        for part in call.mask.parts
    )
    return Shard(
        call=replace(call, mask=Mask(tuple(parts))),
        b=rows,
        n=heads,
        rows=_token_places(division, t) if division.queries else None,
        cols=_token_places(division, s) if division.keys else None,
        s=s * division.size(division.keys),
    )


def _places(axes: tuple[str, ...], size: int) -> Places:
    return Places((jax.lax.axis_index(axes) * size if axes else jnp.int32(0))[None], size)


def _token_places(division: Division, size: int) -> Places:
    return zigzag_places(division.keys, size) if division.ordered else _places(division.keys, size)
