"""A call as splash attention takes it: heads first, padded to its blocks, the mask as structure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Bool, Integer

from flax_attn.backends.call import Call
from flax_attn.backends.containment import on_copies
from flax_attn.backends.nonfinite import headroom
from flax_attn.backends.splash.padding import LANES, has_ids, padded
from flax_attn.functional.mask_parts import Lengths, Segments
from flax_attn.functional.masks import Mask

_BLOCKS = (512, 256, LANES)
# Far below any score and far above what the kernel writes for a hidden score. As a sink it adds
# nothing to a row that sees a key, and makes a row that sees none a row of zeros with zero gradient
# instead of the mean of the values.
_NOTHING = -1e38


def attend(call: Call, interpret: bool) -> Array:
    """Return `(b, t, n, v)`, computed by Pallas's interpreter if asked."""
    if 0 in call.shape:
        return jnp.zeros((*call.query.shape[:3], call.value.shape[3]), call.query.dtype)
    return on_copies(call, partial(_attend, interpret))


def _attend(interpret: bool, call: Call) -> Array:
    b, n, t, _ = call.shape
    masks = _masks(call)
    if not any(_shows(mask) for mask in masks):
        return jnp.zeros((b, t, n, call.value.shape[3]), call.query.dtype)
    query, key, value = (_zero_hidden(call, name) for name in ("query", "key", "value"))
    query = (query.astype(jnp.float32) * jnp.asarray(call.scale, jnp.float32)).astype(query.dtype)
    room = headroom(value, call.shape[3])
    arrays = (_heads_first(x) for x in (query, key, value * room))
    kernel = jax.vmap(_kernel(call, masks, interpret), in_axes=(0, 0, 0, 0, None))
    output = kernel(*arrays, _segment_ids(call), _sinks(call))
    return rearrange(output[:, :, :t] / room, "b n t v -> b t n v")


def _zero_hidden(call: Call, name: str) -> Array:
    """Return query, key or value with zeros for tokens that no row sees.

    Huge numbers in hidden tokens may overflow in the backward kernel.
    """
    inside = _inside(call, "query" if name == "query" else "key")
    return jnp.where(inside[..., None, None], getattr(call, name), 0)


def _inside(call: Call, name: str) -> Bool[Array, "#b t"]:
    """Return which tokens lie within all lengths, and for keys, within what any query may see."""
    index = jnp.arange(getattr(call, name).shape[1])[None]
    inside = jnp.ones_like(index, bool)
    if name == "key":
        seen = call.mask.kv_range(0, call.shape[2] - 1, call.shape[3])
        inside = (index >= seen.start) & (index < seen.stop)
    for part in call.mask.parts:
        if isinstance(part, Lengths) and getattr(part, name) is not None:
            tokens = index[None, None]
            inside = inside & Lengths(**{name: getattr(part, name)}).allow(tokens, tokens)[:, 0, 0]
    return inside


def _heads_first(x: Array) -> Array:
    x = rearrange(x, "b t n h -> b n t h")
    return jnp.pad(x, ((0, 0), (0, 0), (0, padded(x.shape[2]) - x.shape[2]), (0, 0)))


def _sinks(call: Call) -> Array:
    if call.sinks is None:
        return jnp.full(call.shape[1], _NOTHING, call.query.dtype)
    return jnp.maximum(
        call.sinks.astype(call.query.dtype), _NOTHING
    )  # the dtype that the kernel's gradient has


def _segment_ids(call: Call) -> splash.SegmentIds | None:
    """Return ids that are equal where segments and lengths allow; padding has ids of its own."""
    if not has_ids(call):
        return None
    b, _, t, s = call.shape
    query, key = jnp.zeros((1, t), jnp.int32), jnp.zeros((1, s), jnp.int32)
    for part in call.mask.parts:
        if isinstance(part, Segments):
            query, key = _ranked(jnp.atleast_2d(part.query), jnp.atleast_2d(part.key))
    query, key = (
        jnp.where(_inside(call, "query"), query, -1),
        jnp.where(_inside(call, "key"), key, -2),
    )
    return splash.SegmentIds(_pad_ids(query, b, -1), _pad_ids(key, b, -2))


def _ranked(query: Integer[Array, "#b t"], key: Integer[Array, "#b s"]) -> tuple[Array, Array]:
    # Any integers are ids, so none is free to mean padding until they are numbered from 0.
    b = max(query.shape[0], key.shape[0])
    both = jnp.concatenate([jnp.broadcast_to(x, (b, x.shape[1])) for x in (query, key)], axis=1)
    ranks = jax.vmap(lambda ids: jnp.unique_inverse(ids, size=ids.size).inverse_indices)(
        both
    ).astype(jnp.int32)
    return ranks[:, : query.shape[1]], ranks[:, query.shape[1] :]


def _pad_ids(ids: Integer[Array, "#b t"], b: int, pad: int) -> Array:
    size = ids.shape[1]
    return jnp.broadcast_to(
        jnp.pad(ids, ((0, 0), (0, padded(size) - size)), constant_values=pad), (b, padded(size))
    )


def _kernel(call: Call, masks: Sequence[splash.Mask], interpret: bool) -> Callable:
    t, s = (
        next(block for block in _BLOCKS if padded(size) % block == 0) for size in call.shape[2:]
    )
    return splash.make_splash_mha(
        splash.MultiHeadMask(masks),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=call.soft_cap,
        interpret=interpret,
        block_sizes=splash.BlockSizes(
            block_q=t, block_kv=s, block_q_dkv=t, block_kv_dkv=s, block_q_dq=t, block_kv_dq=s
        ),
    )


def _masks(call: Call) -> list[splash.Mask]:
    """Return the static structure of the mask for every head."""
    _, n, t, s = call.shape
    parts = tuple(part for part in call.mask.parts if not isinstance(part, Lengths | Segments))
    if all(part.band() is not None for part in parts):
        return [_band(Mask(parts), (padded(t), padded(s)))] * n
    with jax.ensure_compile_time_eval():
        block = np.asarray(Mask(parts).block(jnp.arange(t), jnp.arange(s))[0])
    block = np.broadcast_to(block, (len(block), t, s))
    block = np.pad(block, ((0, 0), (0, padded(t) - t), (0, padded(s) - s)))
    return [splash.NumpyMask(head) for head in block] * (n // len(block))


def _band(mask: Mask, shape: tuple[int, int]) -> splash.Mask:
    """Return the diagonals that all parts show: the kernel computes these and reads no mask."""
    (low, high), _ = mask.split_band()
    window = (
        None if low is None or low <= -shape[0] else -low,
        None if high is None or high >= shape[1] else high,
    )
    return (
        splash.FullMask(shape)
        if window == (None, None)
        else splash.LocalMask(shape, window, offset=0)
    )


def _shows(mask: splash.Mask) -> bool:
    # The kernel fails on a mask that hides all.
    t, s = mask.shape
    return any(mask[i : i + LANES, :s].any() for i in range(0, t, LANES))
