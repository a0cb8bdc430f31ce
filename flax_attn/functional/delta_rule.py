"""The gated delta rule: attention with a matrix as memory, which every token rewrites."""

from typing import NamedTuple

import jax.numpy as jnp
from einops import rearrange, repeat
from flax.typing import PrecisionLike
from jaxtyping import Array, Bool, Float

from attn_spec.checks import check_dtype
from attn_spec.recurrent_checks import check_delta_rule
from flax_attn.functional.delta_chunks import Steps, chunked, recurrent
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.padding import batched, real_tokens, shape_of
from flax_attn.functional.shapes import RowLengths


class Recurrence(NamedTuple):
    """What a recurrent attention returns.

    Args:
        output: `(b, t, n, v)`, in the dtype of the value.
        state: `(b, n, v, h)`, after the last token of each row, in at least float32.
    """

    output: Float[Array, "*b t n v"]
    state: Float[Array, "*b n v h"]


def gated_delta_rule(
    query: Float[Array, "*b t k h"],
    key: Float[Array, "*b t k h"],
    value: Float[Array, "*b t n v"],
    decay: Float[Array, "*b t n"] | Float[Array, "*b t n h"],
    beta: Float[Array, "*b t n"] | None = None,
    *,
    state: Float[Array, "*b n v h"] | None = None,
    starts: Bool[Array, "*b t"] | None = None,
    lengths: RowLengths = None,
    scale: float | None = None,
    precision: PrecisionLike = None,
) -> Recurrence:
    """Return what every token reads from the state, and the state after the last one.

        S_t = S_{t-1} diag(exp(decay_t)) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T
        o_t = scale * S_t q_t

    The state is decayed, what it holds under the key is replaced by the value to the part `beta`,
    then the query reads. Without `beta` nothing is replaced: `S_t = S_{t-1} diag(exp(decay_t)) +
    v_t k_t^T`, as in lightning attention.

    Several tokens are computed in chunks, as matrix products: memory and time are linear in t. One
    token is a step whose cost does not depend on how many came before. Sums are taken in at least
    float32.

    Args:
        query: `(b, t, k, h)`.
        key: `(b, t, k, h)`; normalised by the caller, so that `beta` between 0 and 1 replaces a
            part of the state.
        value: `(b, t, n, v)`; value head i has the query and the key of head `i // (n / k)`.
        decay: logarithm of what remains of the state, at most 0: one number a head, `(b, t, n)`
            (Gated DeltaNet), or one a feature of the key, `(b, t, n, h)` (Kimi Delta Attention).
        beta: part of the state that is replaced, `(b, t, n)`; None replaces nothing and adds.
        state: state before the first token, `(b, n, v, h)`; None is zeros.
        starts: `(b, t)`, True at the first token of a packed document: it does not see the state
            before it.
        lengths: how many tokens of each row are real, `(b,)`; the rest is padding, which changes no
            state and gives 0. None is all.
        scale: factor on the output; None is `1 / sqrt(h)`.
        precision: precision of the matrix products, as in `jax.lax.dot_general`.

    Shapes:
        All without b for one sequence.

    Raises:
        ValueError: if shapes do not belong together, or an array is not floating point.

    Example:
        >>> q = k = jnp.ones((2, 5, 1, 4)) / 2
        >>> v, decay = jnp.ones((2, 5, 3, 6)), jnp.full((2, 5, 3), -0.1)
        >>> beta = jnp.full((2, 5, 3), 0.5)
        >>> output, state = gated_delta_rule(q, k, v, decay, beta)
        >>> output.shape, state.shape
        ((2, 5, 3, 6), (2, 3, 6, 4))

    References:
        Yang et al. 2024, Gated DeltaNet (arXiv:2412.06464) and the chunked form (arXiv:2406.06484);
        Kimi Team 2025, a decay per feature (arXiv:2510.26692);
        Qin et al. 2024, lightning attention (arXiv:2401.04658).
    """
    given = [x for x in (query, key, value, decay, beta, state) if x is not None]
    check_dtype("all but starts", *given)
    shapes = query.shape, key.shape, value.shape, decay.shape
    check_delta_rule(*shapes, shape_of(beta), shape_of(state), shape_of(starts))
    if query.ndim == 3:
        found = gated_delta_rule(
            query[None],
            key[None],
            value[None],
            decay[None],
            batched(beta),
            state=batched(state),
            starts=batched(starts),
            lengths=lengths,
            scale=scale,
            precision=precision,
        )
        return Recurrence(found.output[0], found.state[0])
    steps = _steps(query, key, value, decay, beta, starts, lengths, scale)
    b, t, n, v = value.shape
    if state is None:
        state = jnp.zeros((b, n, v, key.shape[-1]))
    before = rearrange(state.astype(steps.key.dtype), "b n v h -> (b n) v h")
    # A chunk of one token would be padded.
    compute = recurrent if t == 1 else chunked
    output, after = compute(steps, before, precision)
    output = rearrange(output, "(b n) t v -> b t n v", n=n)
    after = rearrange(after, "(b n) v h -> b n v h", n=n)
    return Recurrence(output.astype(value.dtype), after)


def _steps(query, key, value, decay, beta, starts, lengths, scale) -> Steps:
    """Return the arrays of a call, a row for each head, in the dtype of sums."""
    dtype = accumulation_dtype(query.dtype)
    b, t, n, _ = value.shape
    groups = n // key.shape[2]
    if scale is None:
        scale = query.shape[-1] ** -0.5
    real = real_tokens(b, t, lengths)
    # Padding begins no document.
    starts = jnp.zeros_like(real) if starts is None else starts & real
    # One decay may serve all features of a key.
    if decay.ndim == 3:
        decay = decay[..., None]

    def rows(x: Array, groups: int = 1) -> Array:
        """Hide padding: it adds nothing, under no key, and lets all of the state remain."""
        hidden = jnp.where(real[..., None, None], x, 0)
        return repeat(hidden.astype(dtype), "b t k h -> (b k g) t h", g=groups)

    return Steps(
        query=rows(query, groups) * scale,
        key=rows(key, groups),
        value=rows(value),
        decay=rows(decay),
        beta=None if beta is None else rows(beta[..., None]),
        starts=repeat(starts, "b t -> (b n) t 1", n=n),
    )
