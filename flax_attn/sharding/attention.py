"""One attention call over a mesh, in `jax.shard_map`.

Each device computes its own rows, heads and tokens.
"""

from collections.abc import Iterator, Sequence
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
from flax_attn.sharding.strategies import Kernel, attend_shard, copied_heads
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
    key, value = copied_heads(call, division.copies)
    changes: dict[str, Any] = {"key": key, "value": value}
    _, _, t, _ = call.shape
    if call.bias is not None and t == division.size(division.queries):
        # Of one query a device: one row is that query's, and not one for all.
        b, n, _, s = call.bias.shape
        changes["bias"] = jnp.broadcast_to(call.bias, (b, n, t, s))
    dropout = call.dropout
    if dropout is not None:
        # Every device reads the two integers of a key, whatever form it was given in.
        key = key_data(dropout.key)
        changes["dropout"] = replace(dropout, key=key)
    return replace(call, **changes)


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
        names = _axis_names(call, path)
        return P() if names is None else _spec(division, names, array)

    return jax.tree_util.tree_map_with_path(spec, call)


def _axis_names(call: Call, path: tuple) -> tuple[str | None, ...] | None:
    """Return the names of the axes of an array, as the class that holds it says, or None."""
    *steps, last = path
    owner: Any = call
    for owner in _along(call, steps):
        # A part of a mask that takes its heads of the whole by itself; it may hold any tree.
        if getattr(owner, "axes", {}) is None:
            return None
    return getattr(owner, "axes", {}).get(getattr(last, "name", None))


def _along(node: Any, steps: Sequence[Any]) -> Iterator[Any]:
    """Yield the objects on the path from a node of a tree, one after another."""
    for step in steps:
        is_item = isinstance(step, SequenceKey)
        node = node[step.idx] if is_item else getattr(node, step.name)
        yield node


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
    mask = Mask(tuple(parts))
    devices = division.size(division.keys)
    return Shard(
        call=replace(call, mask=mask),
        b=rows,
        n=heads,
        rows=_token_places(division, t) if division.queries else None,
        cols=_token_places(division, s) if division.keys else None,
        s=s * devices,
    )


def _places(axes: tuple[str, ...], size: int) -> Places:
    start = jax.lax.axis_index(axes) * size if axes else jnp.int32(0)
    return Places(start[None], size)


def _token_places(division: Division, size: int) -> Places:
    # Queries are split as the keys are, or not at all.
    return zigzag_places(division.keys, size) if division.ordered else _places(division.keys, size)
