"""Kernels in C++ for CPUs: tiles in registers, hidden blocks skipped, never holds the scores."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.backends.backend import Backend
from flax_attn.backends.call import Call
from flax_attn.backends.native.kernel import FEW, attend
from flax_attn.backends.platform import may_be_partitioned, varying
from flax_attn.functional.mask_part import IntervalPart
from flax_attn.functional.mask_parts import Dense, Segments
from flax_attn.native import DTYPES, library, missing


class Native(Backend):
    """Kernels in C++, through `jax.ffi`."""

    name = "native"
    platforms = ("cpu",)
    dtypes = DTYPES
    honours = ("soft_cap", "sinks", "precision")
    few = FEW
    typed = True
    nonfinite = "in its kernel"
    structure = "causal, windows, lengths, prefix, segments, arrays: hidden blocks are skipped"
    limits = "masks that are functions, a precision that is an algorithm"

    def preferred(self, call: Call) -> bool:
        # XLA cannot divide the gradient of a call that it cannot look into.
        return jax.sharding.get_abstract_mesh().empty or not may_be_partitioned()

    def refuse(self, call: Call) -> str | None:
        if library() is None:
            return missing()
        rest = [part for part in call.mask.parts if not isinstance(part, IntervalPart | Dense)]
        if len(rest) > 1 or not all(isinstance(part, Segments) for part in rest):
            # Not their arrays, which would be waited for.
            found = " & ".join(type(part).__name__ for part in rest)
            return (
                "native takes causal masks, windows, lengths, prefixes, arrays and one pair of"
                f" segments; got {found}"
            )
        if any(ids.dtype.itemsize > 4 for ids in jax.tree.leaves(rest)):
            return "native compares segment ids of up to 32 bits; got 64. Cast them to int32"
        if not isinstance(call.precision, None | str | jax.lax.Precision):
            return f"native computes in float32 alone; got precision={call.precision}"
        return None

    def attend(self, call: Call) -> Array:
        """Return `(b, t, n, v)`, with gradients of query, key, value and sinks."""
        if 0 in call.shape:
            return jnp.zeros((*call.query.shape[:3], call.value.shape[3]), call.query.dtype)
        # So that gradients of what is the same on all devices are summed over them.
        axes = varying(call)
        call = jax.tree.map(lambda x: _varied(x, axes), call)
        return attend(call)

    def memory(self, call: Call) -> int:
        """Return the bytes of the copies of keys and values, if any, and of the maxima and sums."""
        (b, n, t, s), widths = call.shape, call.key.shape[3] + call.value.shape[3]
        copies = b * call.key.shape[2] * s * widths if t > FEW else 0
        return 4 * (copies + 2 * b * n * t)


def _varied(x: Array, axes: frozenset[str]) -> Array:
    missing = tuple(sorted(axes - varying(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


BACKEND = Native()
