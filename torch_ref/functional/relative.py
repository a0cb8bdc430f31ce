"""Relative positions as biases of the scores: linear (ALiBi) and in learned buckets (T5)."""

import torch
from einops import rearrange
from jaxtyping import Float, Integer
from torch import Tensor

from attn_spec.position_checks import check_same_rows
from attn_spec.relative_positions import alibi_slopes, bucket_starts
from torch_ref.functional.positions import as_positions
from torch_ref.functional.shapes import ArrayLike


def alibi(
    num_heads: int,
    query_positions: ArrayLike,
    key_positions: ArrayLike,
    *,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "*b n t s"]:
    """Attention with linear biases: the farther a key, the lower its score.

        bias = -slope * |query position - key position|

    Under a causal mask it is that of the paper; in both directions it falls equally to either side.

    Shapes:
        Returns `(n, t, s)` or `(b, n, t, s)`, to be passed as `bias=`.

    Example:
        >>> alibi(8, [2], [0, 1, 2])[0]
        tensor([[-1.0000, -0.5000,  0.0000]])
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    distances = _offsets(query_positions, key_positions).abs()
    # Integers change their sign: the 0 of a float would become -0.
    nearness = (-distances).to(dtype)
    slopes = torch.as_tensor(alibi_slopes(num_heads), dtype=dtype, device=nearness.device)
    bias = nearness[..., None] * slopes
    return rearrange(bias, "... t s n -> ... n t s")


def t5_bias(
    table: Float[Tensor, "buckets n"],
    query_positions: ArrayLike,
    key_positions: ArrayLike,
    *,
    bidirectional: bool = True,
    max_distance: int = 128,
) -> Float[Tensor, "*b n t s"]:
    """Relative position bias: a learned number for each head and bucket of distances.

        bias[n, t, s] = table[t5_buckets(...)[t, s], n]

    T5 adds it to scores that are not scaled: `scale=1.0`.

    Shapes:
        Returns `(n, t, s)` or `(b, n, t, s)`, to be passed as `bias=`.

    Example:
        >>> t5_bias(torch.arange(8.0)[:, None], [2], [0, 1, 2, 3])[0]
        tensor([[2., 1., 0., 5.]])
    """
    buckets = t5_buckets(
        query_positions,
        key_positions,
        bidirectional=bidirectional,
        num_buckets=table.shape[0],
        max_distance=max_distance,
    )
    return rearrange(table[buckets], "... t s n -> ... n t s")


def t5_buckets(
    query_positions: ArrayLike,
    key_positions: ArrayLike,
    *,
    bidirectional: bool = True,
    num_buckets: int = 32,
    max_distance: int = 128,
) -> Integer[Tensor, "*b t s"]:
    """Return the bucket of `key position - query position`.

    Small distances have a bucket each, larger ones share ever wider buckets. Of the `m` buckets of
    a direction, half of `num_buckets` or all, distances `d` below `e = m // 2` have one each; the
    others are `e + floor((m - e) * log(d / e) / log(max_distance / e))`, at most `m - 1`. Without
    `bidirectional` keys after the query have distance 0. Computed with integers alone, so the
    same on every device.

    Example:
        >>> t5_buckets([40], [0, 20, 30, 39, 40, 41, 50, 99])
        tensor([[12, 10,  8,  1,  0, 17, 24, 29]])
    """
    offsets = _offsets(query_positions, key_positions)
    one_way = num_buckets // 2 if bidirectional else num_buckets
    starts = torch.tensor(bucket_starts(one_way, max_distance), device=offsets.device)
    # In one direction, keys after the query have distance 0.
    distances = offsets.abs() if bidirectional else (-offsets).clamp(min=0)
    buckets = torch.searchsorted(starts, distances, right=True)
    if not bidirectional:
        return buckets
    # Keys after the query have the other half of the buckets.
    return torch.where(offsets > 0, buckets + one_way, buckets)


def _offsets(query_positions: ArrayLike, key_positions: ArrayLike) -> Integer[Tensor, "*b t s"]:
    query = as_positions(query_positions)
    key = as_positions(key_positions)
    check_same_rows(tuple(query.shape), tuple(key.shape))
    return rearrange(key, "... s -> ... 1 s") - rearrange(query, "... t -> ... t 1")
