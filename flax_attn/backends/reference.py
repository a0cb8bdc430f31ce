"""The formula, materialised: every score in memory. The truth for the others, and the quickest for short inputs."""

from jaxtyping import Array

from flax_attn.backends.call import Call
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.reference import reference_attention


def refuse(call: Call) -> str | None:
    """Return why the formula cannot be computed: it always can."""
    return None


def attend(call: Call) -> Array:
    """Return `(b, t, n, v)`; differentiable in every mode and to every order."""
    return with_weights(call)[0]


def with_weights(call: Call) -> tuple[Array, Array]:
    """Return the output, and the weights `(b, n, t, s)` that were applied to the values."""
    return reference_attention(
        call.query,
        call.key,
        call.value,
        call.bias,
        call.mask,
        scale=call.scale,
        soft_cap=call.soft_cap,
        sinks=call.sinks,
        dropout=call.dropout,
        precision=call.precision,
    )


def memory(call: Call) -> int:
    """Return the bytes of the scores and the weights, and of the mask."""
    b, n, t, s = call.shape
    return b * n * t * s * (2 * accumulation_dtype(call.query.dtype).itemsize + 1)
