"""Non-finite handling: NaN and infinity only reach the rows that may see them, as NaN.

A weight of zero does not keep NaN out, since 0 * NaN is NaN. So the formula is computed with zeros
in the place of tokens that are not finite, and the rows that may see such a token are made NaN.
"""

import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float

from flax_attn.functional.shapes import Visible


def finite_tokens(x: Float[Array, "*b h"]) -> Bool[Array, "*b"]:
    """Return which tokens hold finite numbers only.

    Example:
        >>> finite_tokens(jnp.array([[1.0, 2.0], [jnp.nan, 2.0]]))
        Array([ True, False], dtype=bool)
    """
    return jnp.isfinite(x).all(axis=-1)


def zero_nonfinite(x: Float[Array, "*b h"]) -> Float[Array, "*b h"]:
    """Return x with zeros for tokens that are not finite; the gradient of these is zero.

    Example:
        >>> zero_nonfinite(jnp.array([[1.0, 2.0], [jnp.nan, 2.0]]))
        Array([[1., 2.],
               [0., 0.]], dtype=float32)
    """
    return jnp.where(finite_tokens(x)[..., None], x, 0)


def without_nonfinite_sinks(
    query: Float[Array, "b t n h"], sinks: Float[Array, " n"]
) -> tuple[Float[Array, "b t n h"], Float[Array, " n"]]:
    """Replace sinks that are NaN or infinity, and return NaN for the queries of their heads.

    All rows of such a head read the sink. A sink of -inf is no sink, and stays.

    Example:
        >>> query, sinks = jnp.ones((1, 1, 2, 1)), jnp.array([jnp.inf, -jnp.inf])
        >>> query, sinks = without_nonfinite_sinks(query, sinks)
        >>> query[0, 0, :, 0], sinks
        (Array([nan,  1.], dtype=float32), Array([  0., -inf], dtype=float32))
    """
    # Neither infinity nor NaN is less than infinity; -inf is.
    good = sinks < jnp.inf
    nan_or_zero = jnp.where(good, 0, jnp.nan).astype(query.dtype)
    query = query + nan_or_zero[None, None, :, None]
    return query, jnp.where(good, sinks, 0)


def sees_nonfinite(
    visible: Visible, query_ok: Bool[Array, "b t n"], key_ok: Bool[Array, "b s k"]
) -> Bool[Array, "b n t 1"]:
    """Return which rows are not finite or may see a key or value that is not.

    `query_ok` and `key_ok` say which tokens are finite.
    """
    # Each query head reads the key/value head of its group.
    groups = query_ok.shape[2] // key_ok.shape[2]
    key_ok = jnp.repeat(key_ok, groups, axis=2)
    ok = rearrange(query_ok, "b t n -> b n t 1") & rearrange(key_ok, "b s n -> b n 1 s")
    return (visible & ~ok).any(axis=-1, keepdims=True)
