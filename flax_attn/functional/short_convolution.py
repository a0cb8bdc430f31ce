"""The short convolution before a recurrent attention, over the last few tokens."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attn_spec.recurrent_checks import check_short_convolution
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.padding import batched, real_tokens, shape_of
from flax_attn.functional.shapes import RowLengths


class Convolved(NamedTuple):
    """What a short convolution returns.

    Args:
        output: `(b, t, d)`, in the dtype of x.
        state: `(b, w - 1, d)`, the last inputs of each row; 0 where they belong to another
            document.
    """

    output: Float[Array, "*b t d"]
    state: Float[Array, "*b before d"]


def short_convolution(
    x: Float[Array, "*b t d"],
    kernel: Float[Array, "w d"],
    state: Float[Array, "*b before d"] | None = None,
    *,
    starts: Bool[Array, "*b t"] | None = None,
    lengths: RowLengths = None,
) -> Convolved:
    """Return the causal depthwise convolution, and the inputs that the next tokens need.

        y_t = kernel_{w-1} * x_t + kernel_{w-2} * x_{t-1} + ... + kernel_0 * x_{t-w+1}

    Before the first token stand the inputs of `state`, or zeros.

    Args:
        x: `(b, t, d)`.
        kernel: `(w, d)`, the last row for the token itself.
        state: `(b, w - 1, d)`, the inputs before the first token; None is zeros.
        starts: `(b, t)`, True at the first token of a packed document: what stands before it counts
            as 0.
        lengths: how many tokens of each row are real, `(b,)`; the rest is padding, which counts as
            0. None is all.

    Shapes:
        All without b for one sequence.

    Raises:
        ValueError: if shapes do not belong together.

    Example:
        >>> x, kernel = jnp.arange(4.0)[:, None], jnp.array([[10.0], [1.0]])
        >>> short_convolution(x, kernel).output[:, 0]
        Array([ 0.,  1., 12., 23.], dtype=float32)

    References:
        Fu et al. 2022 (arXiv:2212.14052); Gu and Dao 2023 (arXiv:2312.00752).
    """
    # Before anything is computed: shapes that do not fit would broadcast.
    check_short_convolution(x.shape, kernel.shape, shape_of(state), shape_of(starts))
    if x.ndim == 2:
        found = short_convolution(
            x[None], kernel, batched(state), starts=batched(starts), lengths=lengths
        )
        return Convolved(found.output[0], found.state[0])
    b, t, d = x.shape
    before = len(kernel) - 1
    real = real_tokens(b, t, lengths)
    # Padding begins no document.
    starts = jnp.zeros_like(real) if starts is None else starts & real
    if state is None:
        state = jnp.zeros((b, before, d))
    # Padding may hold anything, also NaN, which a weight of 0 would let through.
    tokens = jnp.where(real[..., None], x, 0)
    inputs = jnp.concatenate([state.astype(x.dtype), tokens], axis=1)
    # The document of each input, counted from the one that the state belongs to.
    documents = jnp.pad(jnp.cumsum(starts, axis=1), [(0, 0), (before, 0)])
    # In float32 for lower dtypes: each input is added to the sum.
    output = _weighted_sums(inputs, documents, kernel.astype(accumulation_dtype(x.dtype)))
    return Convolved(output.astype(x.dtype), _last_inputs(inputs, documents, real, before))


def _weighted_sums(inputs: Array, documents: Array, kernel: Array) -> Array:
    """Return the sums over the inputs of the same document, in the dtype of the kernel."""
    own = documents[:, len(kernel) - 1 :]
    output = jnp.zeros((*own.shape, kernel.shape[1]), kernel.dtype)
    for i in range(len(kernel)):
        seen = _seen(inputs, documents, own, i)
        output = output + kernel[i][None, None] * seen.astype(kernel.dtype)
    return output


def _seen(inputs: Array, documents: Array, own: Array, i: int) -> Array:
    """Return input i of those that each token sees: 0 where another document has it."""
    window = slice(i, i + own.shape[1])
    same = documents[:, window] == own
    return jnp.where(same[..., None], inputs[:, window], 0)


def _last_inputs(inputs: Array, documents: Array, real: Array, count: int) -> Array:
    """Return the last inputs of each row; 0 where they belong to another document."""
    # Before the tokens stand as many inputs of the state: the last ones of n begin at n.
    tokens = real.sum(axis=1, keepdims=True, dtype=jnp.int32)
    last = tokens + jnp.arange(count, dtype=jnp.int32)[None]
    same = jnp.take_along_axis(documents, last, axis=1, mode="clip") == documents[:, -1:]
    state = jnp.take_along_axis(inputs, last[..., None], axis=1, mode="clip")
    return jnp.where(same[..., None], state, 0)
