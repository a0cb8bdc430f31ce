"""cuDNN's fused attention on NVIDIA GPUs, in half precision, with memory linear in the number of tokens."""

from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.backends import containment
from flax_attn.backends.backend import Backend
from flax_attn.backends.band import Band, attend_band, has_lengths, is_band, sides
from flax_attn.backends.call import Call, Unsupported
from flax_attn.backends.dense import array_size, attend_dense, refuse_options

_FILLS = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}  # what jax adds to a hidden score


class CuDNN(Backend):
    """`jax.nn.dot_product_attention` with its cuDNN implementation."""

    name = "cudnn"
    platforms = ("gpu",)
    source = "`jax.nn`"
    structure = "causal and sliding windows at t = s, lengths"
    limits = (
        "all but bfloat16 and float16, head widths above 128 or no multiple of 8, soft cap, sinks, dropout, a "
        "precision, odd t or s with a mask or bias that is an array"
    )

    def preferred(self, call: Call) -> bool:
        return True

    def refuse(self, call: Call) -> str | None:
        """Return why cuDNN cannot honour the call, or None."""
        h, dtype = call.query.shape[-1], call.query.dtype.name
        if not any(find_spec(f"jax_cuda{major}_plugin") for major in (12, 13)):
            return 'cudnn needs the CUDA plugin of JAX, which is not installed: pip install "jax[cuda]"'
        if dtype not in _FILLS:
            return f"cudnn needs bfloat16 or float16; got {dtype}"
        if h % 8 or h > 128:
            return f"cudnn needs a head width that is a multiple of 8 and at most 128 to run on every GPU; got h={h}"
        if isinstance(call.scale, jax.Array):
            return f"cudnn needs a scale that is known before tracing; got {call.scale}. Multiply it into the query"
        if call.soft_cap is not None:
            return f'cudnn has no soft cap; got soft_cap={call.soft_cap}. Pass backend="auto"'
        return refuse_options("cudnn", call) or (None if _keeps(call) else _refuse_array(call))

    def attend(self, call: Call) -> Array:
        """Return the output; causal masks, sliding windows and lengths stay structure, all others become an array."""
        try:
            if _keeps(call):
                return attend_band(call, _kernel)
            return attend_dense(call, partial(_array_kernel, call), _FILLS[call.query.dtype.name])
        except NotImplementedError as limit:  # of this GPU or of this version of cuDNN
            raise Unsupported(f"cudnn: {limit}") from limit

    def memory(self, call: Call) -> int:
        """Return the bytes of clean copies and of the raw output: of one head, or of all beside an array."""
        if _keeps(call):
            return containment.memory(call)
        copies = sum(x.size for x in (call.query, call.query, call.key, call.value))
        return (copies + array_size(call)) * call.query.dtype.itemsize


def _refuse_array(call: Call) -> str | None:
    _, _, t, s = call.shape
    if call.bias is not None and call.bias.dtype != call.query.dtype:
        return (
            f"cudnn adds a bias in the dtype of the query, {call.query.dtype.name}; got {call.bias.dtype.name}. "
            "Cast it where the loss of digits is welcome"
        )
    if t % 2 or s % 2:
        return f"cudnn needs even t and s for a bias or a mask that is an array; got t={t}, s={s}. Pad by one token"
    if s % 128 == 64:
        return (
            "cudnn has kernels that return NaN gradients for strongly negative scores under a bias or a mask that is "
            f"an array when s % 128 == 64; got s={s}. Pad the keys"
        )
    return None


def _keeps(call: Call) -> bool:
    # cuDNN knows a left window only together with causal, and counts positions from other ends when t != s.
    _, _, t, s = call.shape
    return is_band(call) and (sides(call) == (None, None) or (t == s and sides(call)[1] == 0))


def _kernel(call: Call, band: Band, query: Array, key: Array, value: Array) -> Array:
    structure = {"is_causal": band.right == 0, "local_window_size": None if band.left is None else (band.left, 0)}
    return _attention(call, query, key, value, lengths=(band.query, band.key), **structure)


def _array_kernel(call: Call, *arrays: Array | None) -> Array:
    b, _, t, s = call.shape
    return _attention(call, *arrays, lengths=(jnp.full(b, t, jnp.int32), jnp.full(b, s, jnp.int32)))


def _attention(call: Call, *arrays: Any, lengths: tuple[Array, Array], **structure: Any) -> Array:
    _, _, t, s = call.shape
    # Lengths even where nothing is padded: without them cuDNN's gradients count slots past a last tile that is not full
    if has_lengths(call) or t % 128 or s % 128:
        structure |= {"query_seq_lengths": lengths[0], "key_value_seq_lengths": lengths[1]}
    return jax.nn.dot_product_attention(*arrays, scale=float(call.scale), implementation="cudnn", **structure)


BACKEND = CuDNN()
