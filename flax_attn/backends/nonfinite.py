"""Non-finite handling around a kernel: it reads finite numbers, and rows that may see others become NaN.

A kernel that needs it calls `zero_nonfinite` on what it reads and multiplies its output by `row_factor`.
"""

import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float

from flax_attn.backends.call import Call
from flax_attn.functional.nonfinite import finite_tokens, sees_nonfinite

_ROWS = 16  # checked at once


def all_finite(*arrays: Array) -> Bool[Array, ""]:
    """Return whether all numbers are finite; one sum an array.

    0 * x is 0 or NaN: a reduction of `jnp.isfinite` would first be written to memory.
    """
    return jnp.stack([(x * 0).sum() == 0 for x in arrays]).all()


def row_factor(call: Call, dtype) -> Float[Array, "b n t 1"]:
    """Return NaN for the rows that may see a number that is not finite, and 1 for the others.

    A factor, so that gradients become NaN too. Which rows these are is computed only if a number is not finite.
    """
    shape = (*call.shape[:3], 1)
    return lax.cond(
        all_finite(call.query, call.key, call.value),
        lambda: jnp.ones(shape, dtype),
        lambda: jnp.where(_sees_nonfinite(call), jnp.nan, 1).astype(dtype),
    )


def _sees_nonfinite(call: Call) -> Bool[Array, "b n t 1"]:
    query_ok, key_ok = finite_tokens(call.query), finite_tokens(call.key) & finite_tokens(call.value)
    cols = jnp.arange(call.shape[3])

    def one(row: Array) -> Bool[Array, "b n"]:
        visible = call.mask.block(row[None], cols)
        if call.bias is not None:  # -inf hides too
            visible = visible & (call.bias[:, :, jnp.minimum(row, call.bias.shape[2] - 1), None] != -jnp.inf)
        return sees_nonfinite(visible, query_ok[:, row, None], key_ok)[:, :, 0, 0]

    return rearrange(lax.map(one, jnp.arange(call.shape[2]), batch_size=_ROWS), "t b n -> b n t 1")
