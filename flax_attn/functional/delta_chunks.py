"""The gated delta rule token by token, and in chunks of tokens as matrix products.

Only in flax_attn: torch_ref computes token by token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax.typing import PrecisionLike
from jaxtyping import Array

from flax_attn.functional.decayed_products import decayed_products, unit_inverse

CHUNK = 64  # tokens that become one matrix product; a power of 2


class Steps(NamedTuple):
    """The arrays of the tokens of r rows, in the dtype of sums; a row is a head of a sequence.

    Args:
        query: `(r, t, h)`, scaled.
        key: `(r, t, h)`.
        value: `(r, t, v)`.
        decay: logarithms of decays, `(r, t, h)`, or `(r, t, 1)` for all features of a key.
        beta: `(r, t, 1)`, or None.
        starts: `(r, t, 1)`, True where a document begins.
    """

    query: Array
    key: Array
    value: Array
    decay: Array
    beta: Array | None
    starts: Array


def recurrent(steps: Steps, state: Array, precision: PrecisionLike = None) -> tuple[Array, Array]:
    """Return the output `(r, t, v)` and the state `(r, v, h)`, token by token.

    Example:
        >>> x, no = jnp.ones((2, 5, 4)), jnp.zeros((2, 5, 1), bool)
        >>> output, state = recurrent(Steps(x, x, x, -x, None, no), jnp.zeros((2, 4, 4)))
        >>> output.shape
        (2, 5, 4)
    """

    def step(state: Array, token: Any) -> tuple[Array, Array]:
        query, key, value, decay, beta, start = token
        state = jnp.where(start[..., None], 0, state) * jnp.exp(decay)[:, None]
        held = jnp.matmul(state, key[..., None], precision=precision)[..., 0]
        new = value if beta is None else beta * (value - held)
        state = state + new[..., None] * key[:, None]
        return state, jnp.matmul(state, query[..., None], precision=precision)[..., 0]

    if steps.key.shape[1] == 1:
        state, output = step(state, jax.tree.map(lambda x: x[:, 0], steps))
        return output[:, None], state
    state, output = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), steps))
    return jnp.moveaxis(output, 0, 1), state


def chunked(
    steps: Steps, state: Array, precision: PrecisionLike = None, size: int | None = None
) -> tuple[Array, Array]:
    """Return what `recurrent` does, computed in chunks of `size` tokens.

    The size is a power of 2; None is `CHUNK`, or less for few tokens.
    With C the tokens of a chunk, S the state before it, and D_ij the product of decays from j + 1
    to i, the rows u_i = beta_i (v_i - S_{i-1} diag(a_i) k_i) that the tokens add solve one
    triangular system:

        (I + L) U = beta (V - (K * D_i0) S^T),   L_ij = beta_i (k_i * D_ij) . k_j  for j < i
        O = (Q * D_i0) S^T + A U,                A_ij = (q_i * D_ij) . k_j         for j <= i
        S' = S diag(D_C0) + U^T (K * D_Ci)

    Every product of decays is made from the sum of its logarithms alone, so that none exceeds 1.
    What does not depend on the state is computed for all chunks at once, and once more in the
    backward pass, which stores the state of each chunk: memory is linear in t.

    Example:
        >>> x, no = jnp.ones((2, 5, 4)), jnp.zeros((2, 5, 1), bool)
        >>> output, state = chunked(Steps(x, x, x, -x, None, no), jnp.zeros((2, 4, 4)), size=2)
        >>> output.shape
        (2, 5, 4)
    """
    t = steps.key.shape[1]
    size = min(CHUNK, 1 << (t - 1).bit_length()) if size is None else size
    chunks = jax.tree.map(lambda x: _split(x, size), steps)
    prepared = jax.checkpoint(lambda chunks: _prepare(chunks, precision))(chunks)
    count = -(-t // size)
    prepared = jax.tree.map(lambda x: rearrange(x, "(c r) s h -> c r s h", c=count), prepared)

    def run(state: Array, chunk: _Chunk) -> tuple[Array, Array]:
        new = chunk.new
        if chunk.removed is not None:
            new = new - jnp.matmul(chunk.removed, state.mT, precision=precision)
        read = jnp.matmul(chunk.query, state.mT, precision=precision)
        output = read + jnp.matmul(chunk.within, new, precision=precision)
        return state * chunk.kept + jnp.matmul(new.mT, chunk.key, precision=precision), output

    state, output = jax.lax.scan(run, state, prepared)
    return rearrange(output, "c r s v -> r (c s) v")[:, :t], state


class _Chunk(NamedTuple):
    """Chunks of C tokens, ready for a state.

    Args:
        query: `(r, C, h)`, by which tokens read the state before the chunk.
        key: `(r, C, h)`, under which what tokens add is in the state after it.
        new: `(r, C, v)`, what tokens add to an empty state.
        removed: `(r, C, h)`, by which that is less where a state holds something; None where
            nothing is replaced.
        within: `(r, C, C)`, how tokens read what tokens add.
        kept: `(r, 1, h)` or `(r, 1, 1)`, what remains of the state.
    """

    query: Array
    key: Array
    new: Array
    removed: Array | None
    within: Array
    kept: Array


def _split(x: Array, size: int) -> Array:
    return rearrange(
        jnp.pad(x, [(0, 0), (0, -x.shape[1] % size), (0, 0)]), "r (c s) h -> (c r) s h", s=size
    )


def _prepare(chunk: Steps, precision: PrecisionLike) -> _Chunk:
    # The document of each token, counted in its chunk; the state before has 0.
    document = jnp.cumsum(chunk.starts, axis=1)
    carried, to_the_end, same = document == 0, document == document[:, -1:], document == document.mT
    pairs = decayed_products(
        jnp.stack([chunk.query, chunk.key], axis=1), chunk.key, chunk.decay, precision
    )
    within, between = (jnp.where(same, pairs.products[:, i], 0) for i in range(2))
    since = jnp.where(carried, jnp.exp(pairs.before), 0)
    new, removed = chunk.value, None
    if chunk.beta is not None:
        solution = unit_inverse(jnp.tril(between, -1) * chunk.beta) * chunk.beta.mT
        new = jnp.matmul(solution, chunk.value, precision=precision)
        removed = jnp.matmul(solution, chunk.key * since, precision=precision)
    key = chunk.key * jnp.where(to_the_end, jnp.exp(pairs.after), 0)
    return _Chunk(chunk.query * since, key, new, removed, within, since[:, -1:])
