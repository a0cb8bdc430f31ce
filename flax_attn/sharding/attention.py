"""One attention call over a mesh: each device computes its rows, heads and tokens, in `jax.shard_map`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from flax_attn.backends.call import Call
from flax_attn.functional.dropout import key_data
from flax_attn.functional.mask_part import Part
from flax_attn.functional.masks import Mask
from flax_attn.functional.placed import HeadsOf
from flax_attn.functional.places import Places
from flax_attn.functional.traced_score import TracedScore
from flax_attn.sharding.division import Division
from flax_attn.sharding.mapped import on_devices
from flax_attn.sharding.order import zigzag_places
from flax_attn.sharding.shards import Shard
from flax_attn.sharding.strategies import Kernel, attend_shard


def attend(division: Division, call: Call, kernel: Kernel) -> Array:
    """Return the output `(b, t, n, v)` of a call, of which each device computes its part with a kernel.

    Raises:
        Unsupported: if a backend that is asked for by name cannot honour its part of the call.
    """
    return _compiled(_Static(division, kernel, *_static_options(call)), _arrays(division, call))


@dataclass(frozen=True)
class _Static:
    """What is known before tracing."""

    division: Division
    kernel: Kernel
    scale: Any
    soft_cap: float | None
    precision: Any
    platform: str


def _static_options(call: Call) -> tuple[Any, ...]:
    scale = None if isinstance(call.scale, jax.Array) else call.scale
    return scale, call.soft_cap, call.precision, call.platform


def _arrays(division: Division, call: Call) -> dict[str, Any]:
    key, value = (jnp.repeat(x, division.copies, axis=2) if division.copies > 1 else x for x in (call.key, call.value))
    dropout, bias, t = call.dropout, call.bias, call.shape[2]
    if bias is not None and t == division.size(division.queries):
        # Of one query a device: one row is that query's, and not one for all.
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], t, bias.shape[3]))
    return {
        "query": call.query,
        "key": key,
        "value": value,
        "bias": bias,
        "mask": call.mask,
        "score": call.score,
        "scale": call.scale if isinstance(call.scale, jax.Array) else None,
        "sinks": call.sinks,
        "dropout": None if dropout is None else replace(dropout, key=key_data(dropout.key)),
    }


@partial(jax.jit, static_argnums=0, inline=True)  # an eager call would compile its parts each time
def _compiled(static: _Static, arrays: dict[str, Any]) -> Array:
    division = static.division
    return on_devices(
        lambda arrays: attend_shard(division, static.kernel, _shard(static, arrays)),
        division.mesh,
        arrays,
        _specs(division, arrays),
        P(division.batch, division.queries, division.heads),
        division.axes,
    )


def _specs(division: Division, arrays: dict[str, Any]) -> dict[str, Any]:
    batch, heads, queries, keys = division.batch, division.heads, division.queries, division.keys
    whole = jax.tree.map(lambda x: P(), arrays)
    specs = {
        "query": P(batch, queries, heads),
        "key": P(batch, keys, heads),
        "value": P(batch, keys, heads),
        "sinks": None if arrays["sinks"] is None else P(heads),
        "bias": None if arrays["bias"] is None else _broadcast_spec((batch, heads, queries, ()), arrays["bias"]),
        "mask": Mask(tuple(_part_specs(division, part) for part in arrays["mask"].parts)),
        "score": None if arrays["score"] is None else _score_specs(division, arrays["score"]),
    }
    return whole | specs


def _part_specs(division: Division, part: Part) -> Any:
    if part.axes is None:
        return jax.tree.map(lambda x: P(), part)
    split = {"batch": division.batch, "heads": division.heads, None: ()}
    arrays = {name: x for name, x in vars(part).items() if not isinstance(x, int | None)}
    specs = (
        [_broadcast_spec(tuple(split[axis] for axis in part.axes[name]), x)]
        if name in part.axes
        else [P()] * len(jax.tree.leaves(x))  # a function, with the arrays that it captures
        for name, x in arrays.items()
    )
    return jax.tree.unflatten(jax.tree.structure(part), list(chain.from_iterable(specs)))


def _score_specs(division: Division, score: TracedScore) -> TracedScore:
    # Positions are those of whole sequences, and each device takes the indices of its rows and heads.
    rows, cols = (_broadcast_spec((division.batch, ()), x) for x in (score.rows, score.cols))
    function = jax.tree.map(lambda x: P(), score.function)
    return TracedScore(function, P(division.batch), P(division.heads), rows, cols)


def _broadcast_spec(axes: tuple[tuple[str, ...], ...], array: Array) -> P:
    # Aligned at the last axis; an axis of one serves every index.
    own = axes[len(axes) - array.ndim :]
    return P(*(() if size == 1 else axis for axis, size in zip(own, array.shape, strict=True)))


def _shard(static: _Static, arrays: dict[str, Any]) -> Shard:
    division = static.division
    query, key = arrays["query"], arrays["key"]
    b, t, n, _ = query.shape
    s = key.shape[1]
    rows, heads = _places(division.batch, b), _places(division.heads, n)
    parts = (part if part.axes is not None else HeadsOf(part, rows, heads) for part in arrays["mask"].parts)
    scale = static.scale if arrays["scale"] is None else arrays["scale"]
    options = {"soft_cap": static.soft_cap, "precision": static.precision, "platform": static.platform}
    call = Call(**(arrays | {"bias": None, "mask": Mask(tuple(parts)), "scale": scale}), **options)
    at = _token_places(division, t) if division.queries else None
    cols = _token_places(division, s) if division.keys else None
    return Shard(call, arrays["bias"], rows, heads, at, cols, s * division.size(division.keys))


def _places(axes: tuple[str, ...], size: int) -> Places:
    return Places((jax.lax.axis_index(axes) * size if axes else jnp.int32(0))[None], size)


def _token_places(division: Division, size: int) -> Places:
    return zigzag_places(division.keys, size) if division.ordered else _places(division.keys, size)
