"""The formula with all scores in memory: the reference for the others, fastest for short inputs."""

from dataclasses import fields

from jaxtyping import Array

from attn_spec.checks import DTYPES
from flax_attn.backends.backend import Backend
from flax_attn.backends.call import OPTIONS, Call
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.reference import reference_attention

# Up to this many scores a head, t * s, the formula itself is as quick and compiles sooner. Measured
# on CPU, where the two cross between 32 and 64 tokens; guessed elsewhere.
SHORT = {"cpu": 2048, "gpu": 256 * 256, "tpu": 256 * 256}


class Reference(Backend):
    """The formula."""

    name = "reference"
    dtypes = DTYPES
    honours = OPTIONS
    nonfinite = "in the formula: NaN is added to the scores of the rows that see one"

    def preferred(self, call: Call) -> bool:
        _, _, t, s = call.shape
        return t * s <= SHORT[call.platform]

    def attend(self, call: Call) -> Array:
        """Return `(b, t, n, v)`; differentiable in every mode and to every order."""
        return with_weights(call)[0]

    def memory(self, call: Call) -> int:
        """Return the bytes of the scores and the weights, and of the mask."""
        b, n, t, s = call.shape
        return b * n * t * s * (2 * accumulation_dtype(call.query.dtype).itemsize + 1)


def with_weights(call: Call) -> tuple[Array, Array]:
    """Return the output, and the weights `(b, n, t, s)` that were applied to the values."""
    arguments = {
        one.name: getattr(call, one.name) for one in fields(call) if one.name != "platform"
    }
    return reference_attention(**arguments)


BACKEND = Reference()
