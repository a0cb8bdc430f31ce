"""cuDNN's fused attention on NVIDIA GPUs, in half precision, with memory linear in tokens."""

from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.backends import containment, rates
from flax_attn.backends.backend import Backend
from flax_attn.backends.band import Band, attend_band, has_lengths, is_band, sides
from flax_attn.backends.call import Call, Unsupported
from flax_attn.backends.dense import array_size, attend_dense, refuse_empty
from flax_attn.backends.platform import asked_chip, compute_capability
from flax_attn.backends.work import KernelWork, arrays_read, fused

_FILLS = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}  # what jax adds to a hidden score


class CuDNN(Backend):
    """`jax.nn.dot_product_attention` with its cuDNN implementation."""

    name = "cudnn"
    platforms = ("gpu",)
    dtypes = tuple(_FILLS)
    honours = ("bias",)
    nonfinite = "test, then a branch; clean copies where the mask is an array"
    source = "`jax.nn`"
    structure = "causal and sliding windows at t = s, lengths"
    limits = (
        "head widths above 128 (on Hopper 256), a bias of another dtype than the query, no rows or"
        " queries"
    )

    def preferred(self, call: Call) -> bool:
        return True

    def refuse(self, call: Call) -> str | None:
        """Return why cuDNN does not support the call, or None."""
        capability = compute_capability()
        here = asked_chip() is None
        if here and not any(find_spec(f"jax_cuda{major}_plugin") for major in (12, 13)):
            return (
                "cudnn needs the CUDA plugin of JAX, which is not installed: pip install"
                ' "jax[cuda]"'
            )
        if _width(call) > (256 if 9 <= capability < 10 else 128):
            return (
                "cudnn has gradients for head widths up to 128, and on Hopper (compute capability"
                f" 9) up to 256; got h={call.query.shape[-1]}, v={call.value.shape[-1]}, and"
                f" compute capability {capability}"
            )
        return refuse_empty("cudnn", call) or _refuse_bias(call)

    def attend(self, call: Call) -> Array:
        """Return the output.

        Causal masks, sliding windows and lengths stay structure, all others become an array.
        """
        try:
            if _keeps(call):
                return attend_band(call, _kernel)
            return attend_dense(call, partial(_array_kernel, call), _FILLS[call.query.dtype.name])
        except NotImplementedError as limit:  # of this GPU or of this version of cuDNN
            raise Unsupported(f"cudnn: {limit}") from limit

    def memory(self, call: Call) -> int:
        """Return the bytes of clean copies and of the raw output.

        Those of one head; of all heads if sizes are padded or the mask becomes an array.
        """
        if _keeps(call) and not _is_padded(call):
            return containment.memory(call)
        (b, n, _, _), k = call.shape, call.key.shape[2]
        rows, cols, width = _sizes(call)
        array = 0 if _keeps(call) else array_size(call)
        return (2 * b * width * (rows * n + cols * k) + array) * call.query.dtype.itemsize

    def work(self, call: Call) -> KernelWork:
        """Return the work of a kernel, slower with a mask as an array, of a test and copies."""
        share = rates.library(call, structure=_keeps(call))
        # On an H100 the test, and the branch that the host waits for, take 0.2 ms.
        launches = 50 if _keeps(call) else 4
        apart = arrays_read(call) + 2 * self.memory(call)
        return fused(call, share, launches=launches, apart=apart)


def _refuse_bias(call: Call) -> str | None:
    if call.bias is not None and call.bias.dtype != call.query.dtype:
        return (
            f"cudnn adds a bias in the dtype of the query, {call.query.dtype.name}; got"
            f" {call.bias.dtype.name}. Cast it where the loss of digits is welcome"
        )
    return None


def _keeps(call: Call) -> bool:
    # cuDNN knows a left window only together with causal, and counts positions from other ends when
    # t != s.
    _, _, t, s = call.shape
    return is_band(call) and (sides(call) == (None, None) or (t == s and sides(call)[1] == 0))


def _kernel(call: Call, band: Band, query: Array, key: Array, value: Array) -> Array:
    return _attention(
        call,
        query,
        key,
        value,
        lengths=(band.query, band.key),
        is_causal=band.right == 0,
        local_window_size=None if band.left is None else (band.left, 0),
    )


def _array_kernel(call: Call, *arrays: Array | None) -> Array:
    b, _, t, s = call.shape
    lengths = jnp.full(b, t, jnp.int32), jnp.full(b, s, jnp.int32)
    return _attention(call, *arrays, lengths=lengths)


def _attention(
    call: Call,
    query,
    key,
    value,
    bias=None,
    visible=None,
    *,
    lengths: tuple[Array, Array],
    **structure,
):
    _, _, t, s = call.shape
    rows, cols, width = _sizes(call)
    # Lengths even where nothing is padded: without them cuDNN's gradients count slots past a last
    # tile that is not full
    if has_lengths(call) or t % 128 or s % 128:
        structure |= {"query_seq_lengths": lengths[0], "key_value_seq_lengths": lengths[1]}
    output = jax.nn.dot_product_attention(
        _pad(query, {1: rows, 3: width}),
        _pad(key, {1: cols, 3: width}),
        _pad(value, {1: cols, 3: width}),
        None if bias is None else _padded_bias(bias, rows, cols),
        None if visible is None else _pad(visible, {2: rows, 3: cols}),
        scale=float(call.scale),
        implementation="cudnn",
        **structure,
    )
    return output[:, :t, :, : call.value.shape[-1]]


def _padded_bias(bias: Array, rows: int, cols: int) -> Array:
    # jax broadcasts its axes of size 1.
    sizes = {axis: size for axis, size in ((2, rows), (3, cols)) if bias.shape[axis] > 1}
    return _pad(bias, sizes)


def _sizes(call: Call) -> tuple[int, int, int]:
    """Return how many queries, keys and numbers a head the kernel gets.

    jax refuses the gradients of odd t or s, and has one width for queries and values; cuDNN's are
    multiples of 8. Some of its kernels return NaN gradients for strongly negative scores under a
    bias or a mask that is an array when s % 128 == 64.
    """
    _, _, t, s = call.shape
    cols = s + s % 2
    more = 64 if cols % 128 == 64 and not _keeps(call) else 0
    return t + t % 2, cols + more, _width(call)


def _is_padded(call: Call) -> bool:
    _, _, t, s = call.shape
    rows, cols, width = _sizes(call)
    widths = call.query.shape[-1], call.value.shape[-1]
    return (rows, cols) != (t, s) or widths != (width, width)


def _width(call: Call) -> int:
    widest = max(call.query.shape[-1], call.value.shape[-1])
    return widest + -widest % 8


def _pad(x: Array, sizes: dict[int, int]) -> Array:
    # Lengths hide what is added.
    return jnp.pad(x, [(0, sizes.get(axis, size) - size) for axis, size in enumerate(x.shape)])


BACKEND = CuDNN()
