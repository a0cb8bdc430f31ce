"""Relative positions as biases of the scores: linear (ALiBi) and in learned buckets (T5)."""

import jax.numpy as jnp
from einops import rearrange
from flax.typing import Dtype
from jaxtyping import Array, Float, Integer

from attn_spec.position_checks import check_same_rows
from attn_spec.relative_positions import alibi_slopes, bucket_starts
from flax_attn.functional.parameter_sums import lookup
from flax_attn.functional.positions import as_positions
from flax_attn.functional.shapes import ArrayLike


def alibi(
    num_heads: int,
    query_positions: ArrayLike,
    key_positions: ArrayLike,
    *,
    dtype: Dtype | None = None,
) -> Float[Array, "*b n t s"]:
    """Attention with linear biases: the farther a key, the lower its score.

        bias = -slope * |query position - key position|

    Under a causal mask it is that of the paper; in both directions it falls equally to either side.

    Args:
        num_heads: number of query heads n.
        query_positions: integers `(t,)` or `(b, t)`.
        key_positions: integers `(s,)` or `(b, s)`.
        dtype: dtype of the bias; None is the default for floats.

    Shapes:
        Returns `(n, t, s)` or `(b, n, t, s)`, to be passed as `bias=`.

    Raises:
        ValueError: if positions are not integers, their ranks or batches differ, or `num_heads` is
            not positive.

    Example:
        >>> alibi(8, [2], [0, 1, 2])[0]
        Array([[-1. , -0.5,  0. ]], dtype=float32)

    References:
        Press et al. 2021 (arXiv:2108.12409).
    """
    slopes = jnp.asarray(alibi_slopes(num_heads), float if dtype is None else dtype)
    distances = jnp.abs(_offsets(query_positions, key_positions))
    # Integers change their sign: the 0 of a float would become -0.
    nearness = (-distances).astype(slopes.dtype)
    bias = jnp.multiply.outer(nearness, slopes)
    return rearrange(bias, "... t s n -> ... n t s")


def t5_bias(
    table: Float[Array, "buckets n"],
    query_positions: ArrayLike,
    key_positions: ArrayLike,
    *,
    bidirectional: bool = True,
    max_distance: int = 128,
) -> Float[Array, "*b n t s"]:
    """Relative position bias: a learned number for each head and bucket of distances.

        bias[n, t, s] = table[t5_buckets(...)[t, s], n]

    T5 adds it to scores that are not scaled: `scale=1.0`.

    Args:
        table: `(num_buckets, n)`, learned; the first layer's of T5 serves all layers.
        query_positions: integers `(t,)` or `(b, t)`.
        key_positions: integers `(s,)` or `(b, s)`.
        bidirectional: whether keys after the query have buckets of their own, as in an encoder.
        max_distance: distance from which on all share the last bucket.

    Shapes:
        Returns `(n, t, s)` or `(b, n, t, s)`, to be passed as `bias=`.

    Raises:
        ValueError: where `t5_buckets` does.

    Example:
        >>> t5_bias(jnp.arange(8.0)[:, None], [2], [0, 1, 2, 3])[0]
        Array([[2., 1., 0., 5.]], dtype=float32)

    References:
        Raffel et al. 2019 (arXiv:1910.10683).
    """
    buckets = t5_buckets(
        query_positions,
        key_positions,
        bidirectional=bidirectional,
        num_buckets=table.shape[0],
        max_distance=max_distance,
    )
    return rearrange(lookup(table, buckets), "... t s n -> ... n t s")


def t5_buckets(
    query_positions: ArrayLike,
    key_positions: ArrayLike,
    *,
    bidirectional: bool = True,
    num_buckets: int = 32,
    max_distance: int = 128,
) -> Integer[Array, "*b t s"]:
    """Return the bucket of `key position - query position`.

    Small distances have a bucket each, larger ones share ever wider buckets. Of the `m` buckets of
    a direction, half of `num_buckets` or all, distances `d` below `e = m // 2` have one each; the
    others are `e + floor((m - e) * log(d / e) / log(max_distance / e))`, at most `m - 1`. Without
    `bidirectional` keys after the query have distance 0. Computed with integers alone, so the
    same on every device.

    Raises:
        ValueError: if positions are not integers or their ranks or batches differ, if there are
            less than 4 buckets, or 2 for one direction, or if `max_distance` leaves no room for
            wide buckets.

    Example:
        >>> t5_buckets([40], [0, 20, 30, 39, 40, 41, 50, 99])
        Array([[12, 10,  8,  1,  0, 17, 24, 29]], dtype=int32)

    References:
        Raffel et al. 2019 (arXiv:1910.10683).
    """
    offsets = _offsets(query_positions, key_positions)
    one_way = num_buckets // 2 if bidirectional else num_buckets
    starts = jnp.asarray(bucket_starts(one_way, max_distance), offsets.dtype)
    # In one direction, keys after the query have distance 0.
    distances = jnp.abs(offsets) if bidirectional else jnp.maximum(-offsets, 0)
    # Compared with all starts at once: a binary search is a loop.
    buckets = jnp.searchsorted(starts, distances, side="right", method="compare_all")
    buckets = buckets.astype(offsets.dtype)
    if not bidirectional:
        return buckets
    # Keys after the query have the other half of the buckets.
    return jnp.where(offsets > 0, buckets + one_way, buckets)


def _offsets(query_positions: ArrayLike, key_positions: ArrayLike) -> Integer[Array, "*b t s"]:
    query = as_positions(query_positions)
    key = as_positions(key_positions)
    check_same_rows(query.shape, key.shape)
    return rearrange(key, "... s -> ... 1 s") - rearrange(query, "... t -> ... t 1")
