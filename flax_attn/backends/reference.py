"""The formula with all scores in memory: the reference for the others, fastest for short inputs."""

from dataclasses import fields

from jaxtyping import Array

from attn_spec.checks import DTYPES
from flax_attn.backends.backend import Backend
from flax_attn.backends.call import OPTIONS, Call
from flax_attn.backends.platform import chip_in_use
from flax_attn.backends.work import KernelWork, arrays_moved, arrays_read, drawn, products
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.reference import reference_attention

# Up to this many scores a head, t * s, the formula itself is as quick on a CPU and compiles sooner:
# the two cross between 32 and 64 tokens.
SHORT = 2048
# Share of the memory of an accelerator that its scores may take. Training keeps them for every
# layer.
SHARE = 1 / 256


class Reference(Backend):
    """The formula."""

    name = "reference"
    dtypes = DTYPES
    honours = OPTIONS
    typed = True
    every_mode = True
    any_sinks = True
    nonfinite = "in the formula: NaN is added to the scores of the rows that see one"

    def preferred(self, call: Call) -> bool:
        _, _, t, s = call.shape
        if call.platform == "cpu":
            return t * s <= SHORT
        return self.memory(call) <= SHARE * (chip_in_use(call.platform).memory or 0)

    def attend(self, call: Call) -> Array:
        """Return `(b, t, n, v)`; differentiable in every mode and to every order."""
        return with_weights(call)[0]

    def memory(self, call: Call) -> int:
        """Return the bytes of the scores and the weights, and of the mask."""
        b, n, t, s = call.shape
        return b * n * t * s * (2 * accumulation_dtype(call.query.dtype).itemsize + 1)

    def work(self, call: Call) -> KernelWork:
        """Return the work of products in float32, hidden pairs included.

        Scores are written and read for the softmax, and so are the weights. Arrays are tested and
        copied. Compiled for an H200 it launches 16 to 19 kernels, for a v5e 24.
        """
        b, n, t, s = call.shape
        scores = b * n * t * s * accumulation_dtype(call.query.dtype).itemsize
        moved = arrays_moved(call) + 2 * scores
        apart = 3 * scores + 3 * arrays_read(call)
        flops, numbers = products(call, t * s), drawn(call, t * s)
        return KernelWork(18, flops, moved, apart, in_float32=True, drawn=numbers)


def with_weights(call: Call) -> tuple[Array, Array]:
    """Return the output, and the weights `(b, n, t, s)` that were applied to the values."""
    call = call.without_nonfinite_sinks()
    arguments = {
        one.name: getattr(call, one.name) for one in fields(call) if one.name != "platform"
    }
    return reference_attention(**arguments)


BACKEND = Reference()
