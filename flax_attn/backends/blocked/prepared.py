"""The arrays of a call as tiles of many heads read them."""

from typing import NamedTuple

import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float

from flax_attn.backends.blocked.slices import take
from flax_attn.backends.call import Call
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.nonfinite import finite_tokens, zero_nonfinite
from flax_attn.functional.shapes import Index


class Prepared(NamedTuple):
    """The arrays of a call as tiles read them.

    Args:
        call: call that they are of.
        query: query `(b, t, n, h)` of the call; of a tile `(b, t, k, g, h)`.
        key: key `(b, k, s, h)`, with zeros for tokens that are not finite.
        value: value `(b, k, s, v)`, likewise.
        query_nan: NaN where a query is not finite, else 0, `(b, k, t, g, 1)`.
        key_nan: NaN where a key or its value is not finite, else 0, `(b, k, 1, 1, s)`.
        rows: indices of the queries, `(t,)`.
        cols: indices of the keys, `(s,)`.
    """

    call: Call
    query: Array
    key: Float[Array, "b k s h"]
    value: Float[Array, "b k s v"]
    query_nan: Float[Array, "b k t g 1"]
    key_nan: Float[Array, "b k 1 1 s"]
    rows: Index
    cols: Index


def prepared(call: Call) -> Prepared:
    """Return the arrays of a call as tiles read them."""
    dtype = accumulation_dtype(call.query.dtype)
    query_nan = jnp.where(finite_tokens(call.query), 0, jnp.nan).astype(dtype)
    key_ok = finite_tokens(call.key) & finite_tokens(call.value)
    key_nan = jnp.where(key_ok, 0, jnp.nan).astype(dtype)
    _, _, t, s = call.shape
    # XLA would write to memory what it computes of indices that it knows.
    indices = jnp.arange(t, dtype=jnp.int32), jnp.arange(s, dtype=jnp.int32)
    rows, cols = lax.optimization_barrier(indices)
    return Prepared(
        call=call,
        query=call.query,
        key=rearrange(zero_nonfinite(call.key), "b s k h -> b k s h"),
        value=rearrange(zero_nonfinite(call.value), "b s k v -> b k s v"),
        query_nan=rearrange(query_nan, "b t (k g) -> b k t g 1", k=call.key.shape[2]),
        key_nan=rearrange(key_nan, "b s k -> b k 1 1 s"),
        rows=rows,
        cols=cols,
    )


def part_of(
    arrays: Prepared, first: tuple[Index | int, ...], sizes: tuple[int, ...], group: int
) -> Prepared:
    """Return the arrays of `sizes` rows, query heads, queries and keys from `first` on."""
    b, n, row, col = first
    rows, heads, t, s = sizes
    k, shared = n // group, heads // group
    query = take(arrays.query, (b, row, n, 0), (rows, t, heads, arrays.query.shape[3]))
    return Prepared(
        call=arrays.call,
        query=rearrange(query, "b t (k g) h -> b t k g h", g=group),
        key=take(arrays.key, (b, k, col, 0), (rows, shared, s, arrays.key.shape[3])),
        value=take(arrays.value, (b, k, col, 0), (rows, shared, s, arrays.value.shape[3])),
        query_nan=take(arrays.query_nan, (b, k, row, 0, 0), (rows, shared, t, group, 1)),
        key_nan=take(arrays.key_nan, (b, k, 0, 0, col), (rows, shared, 1, 1, s)),
        rows=take(arrays.rows, (row,), (t,)),
        cols=take(arrays.cols, (col,), (s,)),
    )
