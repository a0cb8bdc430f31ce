"""Which tiles of keys a tile of queries sees, and which queries see a tile of keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from flax_attn.backends.call import Call
from flax_attn.backends.fused.kernel import Tiling


def tiles(size: int, tile: int) -> int:
    """Return how many tiles hold so many tokens."""
    return -(-size // tile)


def of_queries(call: Call, tiling: Tiling) -> Int32[Array, "b tiles 2"]:
    """Return the first tile of keys that each tile of queries sees, and the one after the last.

    Of all heads; a tile between them may be hidden.
    """
    b, _, t, s = call.shape
    starts = jnp.arange(tiles(t, tiling.t), dtype=jnp.int32) * tiling.t

    def one(row: Array, start: Array) -> Array:
        last = jnp.minimum(start + tiling.t, t) - 1
        seen = call.mask.row(row).kv_range(start, last, s)
        first = jnp.clip(seen.start, 0, s) // tiling.s
        stop = -(-jnp.clip(seen.stop, 0, s) // tiling.s)
        return jnp.stack([first, jnp.maximum(first, stop)]).astype(jnp.int32)

    over_tiles = jax.vmap(one, (None, 0))
    return jax.vmap(over_tiles, (0, None))(jnp.arange(b, dtype=jnp.int32), starts)


def of_keys(call: Call, tiling: Tiling) -> Int32[Array, "b tiles 2"]:
    """Return the first tile of queries that sees each tile of keys, and the one after the last."""
    found = of_queries(call, tiling)
    first, stop = found[:, :, :1], found[:, :, 1:]
    index = jnp.arange(tiles(call.shape[3], tiling.s), dtype=jnp.int32)
    index = index[None, None]
    seen = (index >= first) & (index < stop)  # (b, tiles of queries, tiles of keys)
    count = seen.shape[1]
    earliest = jnp.argmax(seen, axis=1)
    latest = count - jnp.argmax(seen[:, ::-1], axis=1)
    none = ~seen.any(axis=1)
    ends = jnp.where(none, 0, earliest), jnp.where(none, 0, latest)
    return jnp.stack(ends, axis=-1).astype(jnp.int32)
