"""Splash attention, the Pallas kernel for TPU in JAX: skips hidden blocks, holds no scores.

References:
    jax.experimental.pallas.ops.tpu.splash_attention;
    Dao et al. 2022, FlashAttention (arXiv:2205.14135).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
from jax.core import Tracer
from jaxtyping import Array

from flax_attn.backends import rates
from flax_attn.backends.backend import Backend
from flax_attn.backends.call import ARRAY_SCALE, Call
from flax_attn.backends.splash.padding import LANES, has_ids, padded
from flax_attn.backends.work import KernelWork, fused
from flax_attn.functional.mask_part import IntervalPart, MaskPart
from flax_attn.functional.mask_parts import Dense, Lengths, Segments
from flax_attn.functional.masks import Mask

_INTERPRETED = ContextVar("interpreted", default=False)


class Splash(Backend):
    """Pallas's splash attention."""

    name = "splash"
    dtypes = ("float32", "bfloat16")
    honours = ("soft_cap", "sinks", "precision", ARRAY_SCALE)
    nonfinite = "clean copies"
    source = "Pallas, in JAX"
    structure = "causal and windows with integer offsets, segments, lengths"
    limits = (
        "a precision that is not the default, traced offsets, masks that are functions, dense masks"
        " that are traced or differ between batch rows"
    )

    @property
    def platforms(self) -> tuple[str, ...] | None:
        return None if _INTERPRETED.get() else ("tpu",)

    def preferred(self, call: Call) -> bool:
        return call.platform == "tpu"

    def refuse(self, call: Call) -> str | None:
        return _refuse_numbers(call) or _refuse_mask(call.mask)

    def attend(self, call: Call) -> Array:
        """Return `(b, t, n, v)`, differentiable once, in reverse mode.

        Sinks are rounded to the dtype of the query.

        Finite numbers so large that their products overflow float32 may turn gradients of rows that
        do not see them to NaN, unless no row sees them.
        """
        from flax_attn.backends.splash.kernel import (
            attend,
        )  # Pallas takes a second to import, and is for TPU

        return attend(call, _INTERPRETED.get())

    def memory(self, call: Call) -> int:
        """Return the bytes of padded query, key, value and output, segment ids and a dense mask.

        `b (n t + k s) (h + v) itemsize + 4 b (128 t + 8 s) + n t s`, heads first: an upper bound,
        since XLA keeps some of it in VMEM, and blocks of a mask that repeat are held once.
        """
        b, n, t, s = call.shape
        (t, s), (k, v) = (padded(t), padded(s)), call.value.shape[2:]
        arrays = b * call.query.dtype.itemsize * (n * t + k * s) * (call.query.shape[3] + v)
        ids = 4 * b * (t * LANES + s * 8) * has_ids(call)
        heads = max((_heads(part) for part in call.mask.parts), default=0)
        return arrays + ids + heads * t * s

    def work(self, call: Call) -> KernelWork:
        """Return the work of a kernel and of the copies that it reads, written and read."""
        share = rates.library(call)
        return fused(call, share, launches=10, apart=2 * self.memory(call))


@contextmanager
def interpreted() -> Iterator[None]:
    """Run the kernel in Pallas's interpreter, on any platform and slowly: for tests.

    Example:
        >>> with interpreted():
        ...     BACKEND.platforms is None
        True
    """
    token = _INTERPRETED.set(True)
    try:
        yield
    finally:
        _INTERPRETED.reset(token)


def _refuse_numbers(call: Call) -> str | None:
    if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        return (
            "splash does not compile with jax_enable_x64; got True. Switch it off around the step"
        )
    if call.precision not in (None, "default", jax.lax.Precision.DEFAULT):
        return (
            f"splash multiplies in the default precision; got precision={call.precision}. Pass"
            " precision=None and set jax.default_matmul_precision around the whole step"
        )
    return None


def _refuse_mask(mask: Mask) -> str | None:
    if sum(isinstance(part, Segments) for part in mask.parts) > 1:
        return "splash takes one Mask.segments; got several. Join their ids into one"
    return next((reason for part in mask.parts if (reason := _refuse_part(part))), None)


def _refuse_part(part: MaskPart) -> str | None:
    if isinstance(part, Lengths | Segments):
        return None
    if isinstance(part, IntervalPart):
        return _refuse_interval(part)
    if not isinstance(part, Dense):
        return (
            f"splash has no form for a mask of type {type(part).__name__}. Pass the mask as a"
            " boolean array"
        )
    if isinstance(part.array, Tracer | jax.ShapeDtypeStruct):
        return (
            "splash needs a dense mask that is known before tracing; got a traced one. Build it"
            " outside jax.jit"
        )
    if part.array.ndim == 4 and part.array.shape[0] > 1:
        return (
            f"splash needs one dense mask for all batch rows; got shape {part.array.shape}. "
            "Write what differs between rows as Mask.lengths or Mask.segments"
        )
    return None


def _refuse_interval(part: IntervalPart) -> str | None:
    for name, value in vars(part).items():
        if not isinstance(value, int | None):
            owner = "mask" if name == "offset" else type(part).__name__.lower()
            return (
                f"splash needs the {name} of a {owner} as a Python int; got an array. Pass an int"
            )
    return None


def _heads(part: MaskPart) -> int:
    # How many masks the kernel reads for this part.
    if isinstance(part, Dense):
        return part.array.shape[-3] if part.array.ndim > 2 else 1
    return int(not isinstance(part, Lengths | Segments) and part.band() is None)


BACKEND = Splash()
