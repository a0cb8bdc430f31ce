"""A call as splash attention takes it: heads first, padded to its blocks, the mask as structure."""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

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
    masks = _masks(call)
    if not any(_shows(mask) for mask in masks):
        shape = *call.query.shape[:3], call.value.shape[3]
        return jnp.zeros(shape, call.query.dtype)
    query = _scaled(_zero_hidden(call, "query"), call.scale)
    key = _zero_hidden(call, "key")
    value = _zero_hidden(call, "value")
    room = headroom(value, call.shape[3])
    kernel = jax.vmap(_kernel(call, masks, interpret), in_axes=(0, 0, 0, 0, None))
    output = kernel(
        _heads_first(query),
        _heads_first(key),
        _heads_first(value * room),
        _segment_ids(call),
        _sinks(call),
    )
    output = output[:, :, : call.shape[2]] / room
    return rearrange(output, "b n t v -> b t n v")


def _scaled(query: Array, scale: Any) -> Array:
    # Rounded once, after the product.
    scaled = query.astype(jnp.float32) * jnp.asarray(scale, jnp.float32)
    return scaled.astype(query.dtype)


def _zero_hidden(call: Call, name: str) -> Array:
    """Return query, key or value with zeros for tokens that no row sees.

    Huge numbers in hidden tokens may overflow in the backward kernel.
    """
    inside = _inside(call, "query" if name == "query" else "key")
    return jnp.where(inside[..., None, None], getattr(call, name), 0)


def _inside(call: Call, name: str) -> Bool[Array, "#b t"]:
    """Return which tokens lie within all lengths, and for keys, within what any query may see."""
    index = jnp.arange(getattr(call, name).shape[1])[None]
    inside = jnp.ones_like(index, bool) if name == "query" else _seen_keys(call, index)
    found = [getattr(part, name) for part in call.mask.parts if isinstance(part, Lengths)]
    given = [length for length in found if length is not None]
    return reduce(jnp.logical_and, [_within(length, index) for length in given], inside)


def _seen_keys(call: Call, index: Array) -> Bool[Array, "#b s"]:
    _, _, t, s = call.shape
    seen = call.mask.kv_range(0, t - 1, s)
    return (index >= seen.start) & (index < seen.stop)


def _within(length: Array | int, index: Array) -> Array:
    tokens = index[None, None]
    return Lengths(key=length).allow(tokens, tokens)[:, 0, 0]


def _heads_first(x: Array) -> Array:
    x = rearrange(x, "b t n h -> b n t h")
    tokens = x.shape[2]
    after = 0, padded(tokens) - tokens
    return jnp.pad(x, ((0, 0), (0, 0), after, (0, 0)))


def _sinks(call: Call) -> Array:
    if call.sinks is None:
        return jnp.full(call.shape[1], _NOTHING, call.query.dtype)
    # In the dtype that the kernel's gradient has.
    sinks = call.sinks.astype(call.query.dtype)
    return jnp.maximum(sinks, _NOTHING)


def _segment_ids(call: Call) -> splash.SegmentIds | None:
    """Return ids that are equal where segments and lengths allow; padding has ids of its own."""
    if not has_ids(call):
        return None
    query, key = _segments(call)
    query = jnp.where(_inside(call, "query"), query, -1)
    key = jnp.where(_inside(call, "key"), key, -2)
    return splash.SegmentIds(_pad_ids(query, call.shape[0], -1), _pad_ids(key, call.shape[0], -2))


def _segments(call: Call) -> tuple[Array, Array]:
    _, _, t, s = call.shape
    for part in call.mask.parts:
        if isinstance(part, Segments):
            return _ranked(jnp.atleast_2d(part.query), jnp.atleast_2d(part.key))
    # All tokens lie in one.
    return jnp.zeros((1, t), jnp.int32), jnp.zeros((1, s), jnp.int32)


def _ranked(query: Integer[Array, "#b t"], key: Integer[Array, "#b s"]) -> tuple[Array, Array]:
    # Any integers are ids, so none is free to mean padding until they are numbered from 0.
    b = max(query.shape[0], key.shape[0])
    query, key = (jnp.broadcast_to(x, (b, x.shape[1])) for x in (query, key))
    ranks = jax.vmap(_ranks)(jnp.concatenate([query, key], axis=1))
    return ranks[:, : query.shape[1]], ranks[:, query.shape[1] :]


def _ranks(ids: Integer[Array, " t"]) -> Array:
    found = jnp.unique_inverse(ids, size=ids.size)
    return found.inverse_indices.astype(jnp.int32)


def _pad_ids(ids: Integer[Array, "#b t"], b: int, pad: int) -> Array:
    size = padded(ids.shape[1])
    after = (0, 0), (0, size - ids.shape[1])
    ids = jnp.pad(ids, after, constant_values=pad)
    return jnp.broadcast_to(ids, (b, size))


def _kernel(call: Call, masks: Sequence[splash.Mask], interpret: bool) -> Callable:
    _, _, t, s = call.shape
    rows, cols = _block(t), _block(s)
    return splash.make_splash_mha(
        splash.MultiHeadMask(masks),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=call.soft_cap,
        interpret=interpret,
        block_sizes=splash.BlockSizes(
            block_q=rows,
            block_kv=cols,
            block_q_dkv=rows,
            block_kv_dkv=cols,
            block_q_dq=rows,
            block_kv_dq=cols,
        ),
    )


def _block(size: int) -> int:
    # The largest that divides the padded tokens.
    return next(block for block in _BLOCKS if padded(size) % block == 0)


def _masks(call: Call) -> Sequence[splash.Mask]:
    """Return the static structure of the mask for every head."""
    _, n, t, s = call.shape
    # Lengths and segments are ids, which may be traced.
    parts = tuple(part for part in call.mask.parts if not isinstance(part, Lengths | Segments))
    if all(part.band() is not None for part in parts):
        return [_band(Mask(parts), (padded(t), padded(s)))] * n
    heads = [splash.NumpyMask(head) for head in _padded_array(Mask(parts), t, s)]
    return heads * (n // len(heads))


def _padded_array(mask: Mask, t: int, s: int) -> np.ndarray:
    with jax.ensure_compile_time_eval():
        block = np.asarray(mask.block(jnp.arange(t), jnp.arange(s))[0])
    whole = np.broadcast_to(block, (len(block), t, s))
    return np.pad(whole, ((0, 0), (0, padded(t) - t), (0, padded(s) - s)))


def _band(mask: Mask, shape: tuple[int, int]) -> splash.Mask:
    """Return the diagonals that all parts show: the kernel computes these and reads no mask."""
    (low, high), _ = mask.split_band()
    left = None if low is None or low <= -shape[0] else -low
    right = None if high is None or high >= shape[1] else high
    if left is None and right is None:
        return splash.FullMask(shape)
    return splash.LocalMask(shape, (left, right), offset=0)


def _shows(mask: splash.Mask) -> bool:
    # The kernel fails on a mask that hides all.
    t, s = mask.shape
    return any(mask[i : i + LANES, :s].any() for i in range(0, t, LANES))
