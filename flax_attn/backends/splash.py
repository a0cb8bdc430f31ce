"""Splash attention, the Pallas kernel for TPU that ships with JAX: skips hidden blocks, never holds the scores.

References:
    jax.experimental.pallas.ops.tpu.splash_attention; Dao et al. 2022, FlashAttention (arXiv:2205.14135).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.core import Tracer
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Bool, Integer

from flax_attn.backends.call import Call
from flax_attn.backends.quarantine import finite, poison_factor
from flax_attn.functional.mask_parts import Causal, Dense, Lengths, Part, Prefix, Segments, Window
from flax_attn.functional.masks import Mask

_LANES = 128  # the kernel's blocks are multiples of this many tokens
_BLOCKS = (512, 256, _LANES)
# Far below any score and far above what the kernel puts in a hidden place. As a sink it adds nothing to a row that sees
# a key, and makes a row that sees none a row of zeros with zero gradient instead of the mean of the values.
_NOTHING = -1e38
_INTERPRETED = ContextVar("interpreted", default=False)


def refuse(call: Call) -> str | None:
    """Return why the kernel cannot honour this call, or None."""
    reasons = (_refuse_platform(call), _refuse_numbers(call), _refuse_options(call), _refuse_mask(call.mask))
    return next((reason for reason in reasons if reason), None)


def attend(call: Call) -> Array:
    """Return `(b, t, n, v)`; differentiable once, in reverse mode.

    Finite numbers so large that their products overflow float32 may turn gradients of rows that do not see them to NaN,
    unless nobody sees them.
    """
    b, n, t, _ = call.shape
    masks = _masks(call)
    if b == 0 or not any(_shows(mask) for mask in masks):
        return jnp.zeros((b, t, n, call.value.shape[3]), call.query.dtype)
    query, key, value = (_clean(call, name) for name in ("query", "key", "value"))
    query = (query.astype(jnp.float32) * jnp.asarray(call.scale, jnp.float32)).astype(query.dtype)
    arrays = (_heads_first(x) for x in (query, key, value))
    output = jax.vmap(_kernel(call, masks), in_axes=(0, 0, 0, 0, None))(*arrays, _segment_ids(call), _sinks(call))
    return rearrange(output[:, :, :t] * poison_factor(call, output.dtype), "b n t v -> b t n v")


def memory(call: Call) -> int:
    """Return the bytes of query, key, value and output, padded and heads first, of segment ids and of a dense mask.

    `b (n t + k s) (h + v) itemsize + 4 b (128 t + 8 s) + n t s`, an upper bound: XLA keeps some of it in VMEM, and
    blocks of a mask that repeat are held once.
    """
    b, n, t, s = call.shape
    (t, s), (k, v) = (_padded(t), _padded(s)), call.value.shape[2:]
    arrays = b * call.query.dtype.itemsize * (n * t + k * s) * (call.query.shape[3] + v)
    ids = 4 * b * (t * _LANES + s * 8) * _has_ids(call)
    heads = max((_heads(part) for part in call.mask.parts), default=0)
    return arrays + ids + heads * t * s


@contextmanager
def interpreted() -> Iterator[None]:
    """Run the kernel in Pallas's interpreter, on any platform and slowly: for tests.

    Example:
        >>> with interpreted():
        ...     _INTERPRETED.get()
        True
    """
    token = _INTERPRETED.set(True)
    try:
        yield
    finally:
        _INTERPRETED.reset(token)


def _refuse_platform(call: Call) -> str | None:
    if call.platform == "tpu" or _INTERPRETED.get():
        return None
    return (
        f"splash runs on TPU; got platform={call.platform!r}. Choose another backend, or in tests run it in the "
        "interpreter: with flax_attn.backends.splash.interpreted()"
    )


def _refuse_numbers(call: Call) -> str | None:
    if call.query.dtype not in (jnp.float32, jnp.bfloat16):
        return f"splash takes float32 and bfloat16; got {call.query.dtype.name}. Cast query, key and value"
    if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        return "splash does not compile with jax_enable_x64; got True. Switch it off around the step"
    if call.precision not in (None, "default", jax.lax.Precision.DEFAULT):
        return (
            f"splash multiplies in the default precision; got precision={call.precision}. Pass precision=None and set "
            "jax.default_matmul_precision around the whole step"
        )
    return None


def _refuse_options(call: Call) -> str | None:
    if call.bias is not None:
        return f"splash takes no bias; got one of shape {call.bias.shape}. Pass what hides as a mask"
    if call.sinks is not None and call.sinks.dtype != call.query.dtype:
        return (
            f"splash takes sinks in the dtype of the query, {call.query.dtype.name}; got {call.sinks.dtype.name}. "
            "Cast them"
        )
    if call.dropout is not None and call.dropout.rate > 0:
        return f"splash drops no weights; got dropout={call.dropout.rate}. Drop the output, or choose another backend"
    return None


def _refuse_mask(mask: Mask) -> str | None:
    if sum(isinstance(part, Segments) for part in mask.parts) > 1:
        return "splash takes one Mask.segments; got several. Join their ids into one"
    return next((reason for part in mask.parts if (reason := _refuse_part(part))), None)


def _refuse_part(part: Part) -> str | None:
    if isinstance(part, Causal | Window | Prefix) and not isinstance(part.offset, int):
        return "splash needs the offset of a mask as a Python int; got an array. Pass an int"
    if isinstance(part, Prefix) and not isinstance(part.length, int):
        return "splash needs the length of a prefix as a Python int; got an array. Pass an int"
    if isinstance(part, Dense) and isinstance(part.array, Tracer | jax.ShapeDtypeStruct):
        return "splash needs a dense mask that is known before tracing; got a traced one. Build it outside jax.jit"
    if isinstance(part, Dense) and part.array.ndim == 4 and part.array.shape[0] > 1:
        return (
            f"splash needs one dense mask for all batch rows; got shape {part.array.shape}. "
            "Write what differs between rows as Mask.lengths or Mask.segments"
        )
    return None


def _heads(part: Part) -> int:
    # How many masks the kernel reads for this part.
    if isinstance(part, Dense):
        return part.array.shape[-3] if part.array.ndim > 2 else 1
    return int(isinstance(part, Prefix))


def _clean(call: Call, name: str) -> Array:
    """Return the query, key or value without what may reach a row that does not see it.

    0 * NaN is NaN; and huge numbers in slots that nobody sees may overflow in the backward kernel.
    """
    inside = _inside(call, "query" if name == "query" else "key")
    return jnp.where(inside[..., None, None], finite(getattr(call, name)), 0)


def _inside(call: Call, name: str) -> Bool[Array, "#b t"]:
    """Return which query or key tokens lie within all lengths, and for keys within what any query may see."""
    index = jnp.arange(getattr(call, name).shape[1])[None]
    inside = jnp.ones_like(index, bool)
    if name == "key":
        outer = call.mask.bounds(range(call.shape[2]), call.shape[3]).outer
        inside = (index >= outer.start) & (index < outer.stop)
    for part in call.mask.parts:
        if isinstance(part, Lengths) and getattr(part, name) is not None:
            place = index[None, None]
            inside = inside & Lengths(**{name: getattr(part, name)}).allow(place, place)[:, 0, 0]
    return inside


def _padded(size: int) -> int:
    return -(-size // _LANES) * _LANES


def _heads_first(x: Array) -> Array:
    x = rearrange(x, "b t n h -> b n t h")
    return jnp.pad(x, ((0, 0), (0, 0), (0, _padded(x.shape[2]) - x.shape[2]), (0, 0)))


def _sinks(call: Call) -> Array:
    if call.sinks is None:
        return jnp.full(call.shape[1], _NOTHING, call.query.dtype)
    return jnp.maximum(call.sinks, _NOTHING)


def _has_ids(call: Call) -> bool:
    return call.shape[3] % _LANES > 0 or any(isinstance(part, Lengths | Segments) for part in call.mask.parts)


def _segment_ids(call: Call) -> splash.SegmentIds | None:
    """Return ids that are equal where segments and lengths let through: padding gets ids of its own."""
    if not _has_ids(call):
        return None
    b, _, t, s = call.shape
    query, key = jnp.zeros((1, t), jnp.int32), jnp.zeros((1, s), jnp.int32)
    for part in call.mask.parts:
        if isinstance(part, Segments):
            query, key = _ranked(jnp.atleast_2d(part.query), jnp.atleast_2d(part.key))
    query, key = jnp.where(_inside(call, "query"), query, -1), jnp.where(_inside(call, "key"), key, -2)
    return splash.SegmentIds(_pad_ids(query, b, -1), _pad_ids(key, b, -2))


def _ranked(query: Integer[Array, "#b t"], key: Integer[Array, "#b s"]) -> tuple[Array, Array]:
    # Any integers are ids, so none is free to mean padding until they are numbered from 0.
    b = max(query.shape[0], key.shape[0])
    both = jnp.concatenate([jnp.broadcast_to(x, (b, x.shape[1])) for x in (query, key)], axis=1)
    ranks = jax.vmap(lambda ids: jnp.unique_inverse(ids, size=ids.size).inverse_indices)(both).astype(jnp.int32)
    return ranks[:, : query.shape[1]], ranks[:, query.shape[1] :]


def _pad_ids(ids: Integer[Array, "#b t"], b: int, pad: int) -> Array:
    size = ids.shape[1]
    return jnp.broadcast_to(jnp.pad(ids, ((0, 0), (0, _padded(size) - size)), constant_values=pad), (b, _padded(size)))


def _kernel(call: Call, masks: Sequence[splash.Mask]) -> Callable:
    t, s = (next(block for block in _BLOCKS if _padded(size) % block == 0) for size in call.shape[2:])
    return splash.make_splash_mha(
        splash.MultiHeadMask(masks),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=call.soft_cap,
        interpret=_INTERPRETED.get(),
        block_sizes=splash.BlockSizes(
            block_q=t, block_kv=s, block_q_dkv=t, block_kv_dkv=s, block_q_dq=t, block_kv_dq=s
        ),
    )


def _masks(call: Call) -> list[splash.Mask]:
    """Return the static structure of the mask for every head."""
    _, n, t, s = call.shape
    parts = tuple(part for part in call.mask.parts if not isinstance(part, Lengths | Segments))
    if all(isinstance(part, Causal | Window) for part in parts):
        return [_band(Mask(parts), (_padded(t), _padded(s)))] * n
    with jax.ensure_compile_time_eval():
        block = np.asarray(Mask(parts).block(jnp.arange(t), jnp.arange(s))[0])
    block = np.broadcast_to(block, (len(block), t, s))
    block = np.pad(block, ((0, 0), (0, _padded(t) - t), (0, _padded(s) - s)))
    return [splash.NumpyMask(head) for head in block] * (n // len(block))


def _band(mask: Mask, shape: tuple[int, int]) -> splash.Mask:
    """Return the diagonals that all parts let through: the kernel computes these and reads no mask."""
    (low, high), _ = mask.split_band()
    window = None if low is None or low <= -shape[0] else -low, None if high is None or high >= shape[1] else high
    return splash.FullMask(shape) if window == (None, None) else splash.LocalMask(shape, window, offset=0)


def _shows(mask: splash.Mask) -> bool:
    # The kernel fails on a mask that hides all.
    t, s = mask.shape
    return any(mask[i : i + _LANES, :s].any() for i in range(0, t, _LANES))
