"""Fused attention on NVIDIA GPUs by tokamax's Mosaic and Triton kernels, in half precision.

It is chosen by name only: which calls it takes depends on its version, and shows when it compiles,
too late for another backend.
"""

from functools import partial
from importlib import import_module
from importlib.util import find_spec

import jax
import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.backends import containment, rates
from flax_attn.backends.backend import Backend
from flax_attn.backends.band import Band, attend_band, has_lengths, is_band, sides
from flax_attn.backends.call import Call, Unsupported
from flax_attn.backends.dense import array_size, attend_dense, refuse_empty, refuse_widths
from flax_attn.backends.platform import compute_capability
from flax_attn.backends.work import KernelWork, arrays_read, fused

_FILL = float(jnp.finfo(jnp.float32).min)  # what the kernels put in the place of a hidden score


class Tokamax(Backend):
    """`tokamax.dot_product_attention`."""

    name = "tokamax"
    platforms = ("gpu",)
    dtypes = ("bfloat16", "float16")
    honours = ("bias", "soft_cap")
    nonfinite = "test, then a branch; clean copies where the mask is an array"
    source = "openxla/tokamax, optional"
    structure = "causal, windows, key lengths"
    limits = "before Hopper a soft cap, no rows or queries"

    def refuse(self, call: Call) -> str | None:
        """Return why tokamax does not support the call, or None."""
        if not find_spec("tokamax"):
            return "tokamax is not installed: pip install tokamax (Python 3.12 or newer)"
        if call.soft_cap is not None and implementation() == "triton":
            return (
                "tokamax has a gradient of the soft cap on GPUs of compute capability 9 and 10"
                f" only; got soft_cap={call.soft_cap}"
            )
        return refuse_empty("tokamax", call) or refuse_widths("tokamax", call)

    def attend(self, call: Call) -> Array:
        """Return the output of the kernel that has a gradient on this GPU."""
        try:
            return attend_with(call, implementation())
        except NotImplementedError as limit:  # of this GPU or of this version of tokamax
            raise Unsupported(f"tokamax: {limit}") from limit

    def memory(self, call: Call) -> int:
        """Return the bytes of clean copies and of the raw output.

        Those of one head; of all heads if the mask becomes an array.
        """
        if _keeps(call):
            return containment.memory(call)
        # The output is as large as the query.
        copied = 2 * call.query.size + call.key.size + call.value.size
        bias = 0 if call.bias is None else call.bias.dtype.itemsize
        return copied * call.query.dtype.itemsize + array_size(call) * (1 + bias)

    def work(self, call: Call) -> KernelWork:
        """Return the work of a kernel, slower with a mask as an array, of a test and copies."""
        share = rates.library(call, structure=_keeps(call))
        return fused(call, share, launches=4, apart=arrays_read(call) + 2 * self.memory(call))


def implementation() -> str:
    """Return `"mosaic_gpu"` on GPUs that it has a gradient for, else `"triton"`.

    Those are Hopper's and Blackwell's.
    """
    return "mosaic_gpu" if 9 <= compute_capability() < 11 else "triton"


def attend_with(call: Call, name: str) -> Array:
    """Return the output of one tokamax implementation; `"xla"`, `"xla_chunked"` run anywhere."""
    attention = partial(
        _attention,
        scale=call.scale,
        logits_soft_cap=call.soft_cap,
        implementation=name,
    )

    def kernel(call: Call, band: Band, query, key, value):
        return attention(query, key, value, **_structure(call, band))

    return attend_band(call, kernel) if _keeps(call) else attend_dense(call, attention, _FILL)


def _attention(*arrays, **options):
    attend = import_module("tokamax").dot_product_attention  # optional, and slow to import
    # It relies on both.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return attend(*arrays, **options)


def _keeps(call: Call) -> bool:
    # Queries whose window ends left of where the keys end see nothing, which the kernels must not
    # meet.
    _, _, t, s = call.shape
    return is_band(call) and not (sides(call)[0] is not None and (has_lengths(call) or t > s))


def _structure(call: Call, band: Band) -> dict:
    # Padded queries are zeroed outside: their lengths would be made an array.
    lengths = {"key_value_seq_lengths": band.key} if has_lengths(call) else {}
    if band.left is None and band.right in (0, None):
        return {"is_causal": band.right == 0, **lengths}
    _, _, t, s = call.shape
    left = t if band.left is None else band.left
    return {"local_window_size": (left, s if band.right is None else band.right), **lengths}


BACKEND = Tokamax()
