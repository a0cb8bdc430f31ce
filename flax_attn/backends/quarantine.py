"""What is not finite stays where it is seen: kept out of a kernel, and put back as NaN in the rows that see it."""

import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float

from flax_attn.backends.call import Call

_ROWS = 16  # checked at once


def finite(x: Float[Array, "*b h"], kept: Float[Array, "*b h"] | None = None) -> Float[Array, "*b h"]:
    """Return `kept`, which is x unless given, with zeros for tokens of x that hold a number that is not finite.

    A weight of zero does not keep out NaN, since 0 * NaN is NaN. The gradient of such a token is zero.
    """
    return jnp.where(_tokens_ok(x)[..., None], x if kept is None else kept, 0)


def _tokens_ok(x: Float[Array, "*b h"]) -> Bool[Array, "*b"]:
    return jnp.isfinite(x).all(axis=-1)


def poison_factor(call: Call, dtype) -> Float[Array, "b n t 1"]:
    """Return NaN for the rows that may see a number that is not finite, and 1 for the others.

    A factor, so that gradients feel it too. Costs little where all numbers are finite.
    """
    # 0 * x is 0 or NaN: one sum says it all, where a reduction of jnp.isfinite would first be written to memory.
    clean = sum((x * 0).sum() for x in (call.query, call.key, call.value)) == 0
    shape = (*call.shape[:3], 1)
    return lax.cond(clean, lambda: jnp.ones(shape, dtype), lambda: jnp.where(_poisoned(call), jnp.nan, 1).astype(dtype))


def _poisoned(call: Call) -> Bool[Array, "b n t 1"]:
    _, n, t, s = call.shape
    query, key, value = (_tokens_ok(x) for x in (call.query, call.key, call.value))
    key = jnp.repeat(key & value, n // key.shape[2], axis=2)

    def sees(row: Array) -> Bool[Array, "b n"]:
        bad = ~(query[:, row, :, None] & rearrange(key, "b s n -> b n s"))
        seen = call.mask.block(row[None], jnp.arange(s))[:, :, 0]
        if call.bias is not None:  # -inf hides too
            seen = seen & (call.bias[:, :, jnp.minimum(row, call.bias.shape[2] - 1)] != -jnp.inf)
        return (seen & bad).any(axis=-1)

    return rearrange(lax.map(sees, jnp.arange(t), batch_size=_ROWS), "t b n -> b n t 1")
