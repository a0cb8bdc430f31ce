"""The gated delta rule token by token, and in chunks of tokens as matrix products.

Only in flax_attn: torch_ref computes token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax.typing import PrecisionLike
from jaxtyping import Array

from flax_attn.functional.decayed_products import decayed_products, unit_inverse

# Tokens that become one matrix product; a power of 2.
CHUNK = 64


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
    step = partial(_token_step, precision=precision)
    # A step of decoding: a loop of one turn would cost more than its work.
    if steps.key.shape[1] == 1:
        return _only_step(step, steps, state)
    tokens_first = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), steps)
    state, output = jax.lax.scan(step, state, tokens_first)
    return jnp.moveaxis(output, 0, 1), state


def _only_step(step: Callable, steps: Steps, state: Array) -> tuple[Array, Array]:
    """Return the output and the state of the one token that there is."""
    token = jax.tree.map(lambda x: x[:, 0], steps)
    state, output = step(state, token)
    return output[:, None], state


def _token_step(state: Array, token: Steps, precision: PrecisionLike) -> tuple[Array, Array]:
    """Return the state after a token, and its output."""
    state = _decayed(state, token)
    new = token.value
    if token.beta is not None:
        new = token.beta * (new - _read(state, token.key, precision))
    state = state + new[..., None] * token.key[:, None]
    return state, _read(state, token.query, precision)


def _decayed(state: Array, token: Steps) -> Array:
    # A token that begins a document finds an empty state.
    kept = jnp.where(token.starts[..., None], 0, state)
    return kept * jnp.exp(token.decay)[:, None]


def _read(state: Array, key: Array, precision: PrecisionLike) -> Array:
    """Return what states `(r, v, h)` hold under keys `(r, h)`, `(r, v)`."""
    return jnp.matmul(state, key[..., None], precision=precision)[..., 0]


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
    if size is None:
        size = min(CHUNK, 1 << (t - 1).bit_length())
    prepared = _prepared_chunks(steps, size, precision)
    step = partial(_chunk_step, precision=precision)
    state, output = jax.lax.scan(step, state, prepared)
    output = rearrange(output, "c r s v -> r (c s) v")
    # Without the zeros behind the last token.
    return output[:, :t], state


def _prepared_chunks(steps: Steps, size: int, precision: PrecisionLike) -> _Chunk:
    """Return what is computed for all chunks at once, `(c, r, ...)`: c chunks of r rows."""
    chunks = jax.tree.map(partial(_split, size=size), steps)
    # Prepared again in the backward pass.
    prepare = jax.checkpoint(partial(_prepare, precision=precision))
    prepared = prepare(chunks)
    count = -(-steps.key.shape[1] // size)
    return jax.tree.map(lambda x: rearrange(x, "(c r) s h -> c r s h", c=count), prepared)


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
    """Return tokens `(r, t, h)` in chunks, `(c r, size, h)`, with zeros behind the last."""
    missing = -x.shape[1] % size
    padded = jnp.pad(x, [(0, 0), (0, missing), (0, 0)])
    return rearrange(padded, "r (c s) h -> (c r) s h", s=size)


def _prepare(chunk: Steps, precision: PrecisionLike) -> _Chunk:
    """Return chunks ready for a state: `within` is A, `since` the decays D_i0, `until` D_Ci."""
    # The document of each token, counted in its chunk; the state before has 0.
    document = jnp.cumsum(chunk.starts, axis=1)
    of_the_state = document == 0
    of_the_end = document == document[:, -1:]
    same = document == document.mT

    both = jnp.stack([chunk.query, chunk.key], axis=1)
    pairs = decayed_products(both, chunk.key, chunk.decay, precision)
    within = jnp.where(same, pairs.products[:, 0], 0)
    between = jnp.where(same, pairs.products[:, 1], 0)
    since = jnp.where(of_the_state, jnp.exp(pairs.before), 0)
    until = jnp.where(of_the_end, jnp.exp(pairs.after), 0)

    product = partial(jnp.matmul, precision=precision)
    new = chunk.value
    removed = None
    # Without beta nothing is replaced: what a token adds depends on no other.
    if chunk.beta is not None:
        solution = _solution(between, chunk.beta)
        new = product(solution, chunk.value)
        removed = product(solution, chunk.key * since)
    return _Chunk(
        query=chunk.query * since,
        key=chunk.key * until,
        new=new,
        removed=removed,
        within=within,
        kept=since[:, -1:],
    )


def _solution(between: Array, beta: Array) -> Array:
    """Return `(I + L)^-1 beta`, by which the triangular system of a chunk is solved."""
    lower = jnp.tril(between, -1) * beta
    return unit_inverse(lower) * beta.mT


def _chunk_step(state: Array, chunk: _Chunk, precision: PrecisionLike) -> tuple[Array, Array]:
    """Return the state after a chunk, and its output."""
    product = partial(jnp.matmul, precision=precision)
    new = _added(state, chunk, precision)
    before = product(chunk.query, state.mT)
    within = product(chunk.within, new)
    added = product(new.mT, chunk.key)
    return state * chunk.kept + added, before + within


def _added(state: Array, chunk: _Chunk, precision: PrecisionLike) -> Array:
    """Return what the tokens of a chunk add to a state."""
    if chunk.removed is None:
        return chunk.new
    # What the state holds under their keys is replaced.
    held = jnp.matmul(chunk.removed, state.mT, precision=precision)
    return chunk.new - held
