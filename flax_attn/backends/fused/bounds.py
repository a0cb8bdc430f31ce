"""Which tiles of keys a tile of queries sees, and which queries see a tile of keys."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from flax_attn.backends.call import Call
from flax_attn.backends.fused.kernel import Tiling


def tiles(size: int, tile: int) -> int:
    """Return how many tiles hold so many tokens."""
    return -(-size // tile)


def of_queries(call: Call, tiling: Tiling) -> Int32[Array, "b tiles 2"]:
    """Return the first tile of keys that each tile of queries sees, and the one after the last.

    Of all heads; a tile between them may be hidden.
    """
    b, _, t, _ = call.shape
    starts = jnp.arange(tiles(t, tiling.t), dtype=jnp.int32) * tiling.t
    over_tiles = jax.vmap(partial(_tiles_seen, call, tiling), (None, 0))
    return jax.vmap(over_tiles, (0, None))(jnp.arange(b, dtype=jnp.int32), starts)


def _tiles_seen(call: Call, tiling: Tiling, row: Array, start: Array) -> Int32[Array, " 2"]:
    _, _, t, s = call.shape
    last = jnp.minimum(start + tiling.t, t) - 1
    seen = call.mask.row(row).kv_range(start, last, s)
    first = jnp.clip(seen.start, 0, s) // tiling.s
    stop = -(-jnp.clip(seen.stop, 0, s) // tiling.s)
    return jnp.stack([first, jnp.maximum(first, stop)]).astype(jnp.int32)


def of_keys(call: Call, tiling: Tiling) -> Int32[Array, "b tiles 2"]:
    """Return the first tile of queries that sees each tile of keys, and the one after the last."""
    found = of_queries(call, tiling)
    index = jnp.arange(tiles(call.shape[3], tiling.s), dtype=jnp.int32)
    index = index[None, None]
    seen = (index >= found[:, :, :1]) & (index < found[:, :, 1:])
    return _first_and_stop(seen)


def _first_and_stop(seen: Bool[Array, "b queries keys"]) -> Int32[Array, "b keys 2"]:
    first = lax.argmax(seen, 1, jnp.int32)
    stop = seen.shape[1] - lax.argmax(seen[:, ::-1], 1, jnp.int32)
    # Nothing lies between two zeros.
    none = ~seen.any(axis=1)
    return jnp.stack([jnp.where(none, 0, first), jnp.where(none, 0, stop)], axis=-1)
