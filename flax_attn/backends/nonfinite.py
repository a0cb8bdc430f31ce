"""Which numbers of a call are finite, and which rows see one that is not."""

from functools import partial
from math import ceil, log2

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float

from flax_attn.backends.call import Call
from flax_attn.functional.nonfinite import finite_tokens, sees_nonfinite

_SEEN = 2**20  # pairs of tokens checked at once


def all_finite(*arrays: Array) -> Bool[Array, ""]:
    """Return whether all numbers are finite; one sum an array.

    0 * x is 0 or NaN: a reduction of `jnp.isfinite` would first be written to memory.
    """
    return jnp.stack([(x * 0).sum() == 0 for x in arrays]).all()


def headroom(value: Float[Array, "*b v"], most: int | float) -> Float[Array, ""]:
    """Return a power of two to multiply values by, so that sums of `most` of them are finite.

    It is mostly 1.

    Kernels that divide by the sum of a row at its end need it; the formula sums what is divided
    already.

    Example:
        >>> headroom(jnp.array([1.0, -2.0]), 1000), headroom(jnp.array([1.0, -3e38]), 1000)
        (Array(1., dtype=float32), Array(0.00048828, dtype=float32))
    """
    share = 0.5 ** ceil(log2(2 * max(most, 1)))
    largest = jnp.abs(value).max(initial=0)
    return jnp.where(largest > float(jnp.finfo(value.dtype).max) * share, share, 1).astype(
        value.dtype
    )


def row_factor(call: Call, dtype) -> Float[Array, "b n t 1"]:
    """Return NaN for the rows that may see a number that is not finite, and 1 for the others.

    A factor, so that gradients become NaN too. Which rows these are is computed only if a number is
    not finite.
    """
    return _row_factor(dtype, call)


# An eager call would compile the branches each time.
@partial(jax.jit, static_argnums=0, inline=True)
def _row_factor(dtype, call: Call) -> Array:
    b, n, t, _ = call.shape
    return lax.cond(
        all_finite(call.query, call.key, call.value),
        lambda: jnp.ones((b, n, t, 1), dtype),
        lambda: known_row_factor(call, dtype),
    )


def known_row_factor(call: Call, dtype) -> Float[Array, "b n t 1"]:
    """Return `row_factor` where it is known that a number is not finite."""
    return jnp.where(_rows(call), jnp.nan, 1).astype(dtype)


def _rows(call: Call) -> Bool[Array, "b n t 1"]:
    query_ok = finite_tokens(call.query)
    key_ok = finite_tokens(call.key) & finite_tokens(call.value)
    one = partial(_row, call, query_ok, key_ok)
    found = lax.map(one, jnp.arange(call.shape[2]), batch_size=_rows_at_once(call))
    return rearrange(found, "t b n -> b n t 1")


def _rows_at_once(call: Call) -> int:
    b, n, _, s = call.shape
    pairs = b * n * max(s, 1)
    # A symbol has no order among numbers.
    return max(_SEEN // pairs, 1) if isinstance(pairs, int) else 1


def _row(call: Call, query_ok: Array, key_ok: Array, row: Array) -> Bool[Array, "b n"]:
    # Whether one query sees a number that is not finite.
    visible = call.mask.block(row[None], jnp.arange(call.key.shape[1]))
    if call.bias is not None:
        # -inf hides too.
        own = call.bias[:, :, jnp.minimum(row, call.bias.shape[2] - 1), None]
        visible = visible & (own != -jnp.inf)
    return sees_nonfinite(visible, query_ok[:, row, None], key_ok)[:, :, 0, 0]
