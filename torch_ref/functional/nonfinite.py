"""Non-finite handling: NaN and infinity only reach the rows that may see them, as NaN.

A weight of zero does not keep NaN out, since 0 * NaN is NaN. So the formula is computed with zeros
in the place of tokens that are not finite, and the rows that may see such a token are made NaN.
"""

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from torch_ref.functional.shapes import Visible


def finite_tokens(x: Float[Tensor, "*b h"]) -> Bool[Tensor, "*b"]:
    """Return which tokens hold finite numbers only.

    Example:
        >>> finite_tokens(torch.tensor([[1.0, 2.0], [torch.nan, 2.0]]))
        tensor([ True, False])
    """
    return torch.isfinite(x).all(dim=-1)


def zero_nonfinite(x: Float[Tensor, "*b h"]) -> Float[Tensor, "*b h"]:
    """Return x with zeros for tokens that are not finite; the gradient of these is zero.

    Example:
        >>> zero_nonfinite(torch.tensor([[1.0, 2.0], [torch.nan, 2.0]]))
        tensor([[1., 2.],
                [0., 0.]])
    """
    return torch.where(finite_tokens(x)[..., None], x, 0)


def without_nonfinite_sinks(
    query: Float[Tensor, "b t n h"], sinks: Float[Tensor, " n"]
) -> tuple[Float[Tensor, "b t n h"], Float[Tensor, " n"]]:
    """Replace sinks that are NaN or infinity, and return NaN for the queries of their heads.

    All rows of such a head read the sink. A sink of -inf is no sink, and stays.

    Example:
        >>> query, sinks = torch.ones((1, 1, 2, 1)), torch.tensor([torch.inf, -torch.inf])
        >>> query, sinks = without_nonfinite_sinks(query, sinks)
        >>> query[0, 0, :, 0], sinks
        (tensor([nan, 1.]), tensor([0., -inf]))
    """
    # Neither infinity nor NaN is less than infinity; -inf is.
    good = sinks < torch.inf
    nan_or_zero = torch.where(good, 0, torch.nan).to(query.dtype)
    query = query + nan_or_zero[None, None, :, None]
    return query, torch.where(good, sinks, 0)


def sees_nonfinite(
    visible: Visible, query_ok: Bool[Tensor, "b t n"], key_ok: Bool[Tensor, "b s k"]
) -> Bool[Tensor, "b n t 1"]:
    """Return which rows are not finite or may see a key or value that is not.

    `query_ok` and `key_ok` say which tokens are finite.
    """
    # Each query head reads the key/value head of its group.
    groups = query_ok.shape[2] // key_ok.shape[2]
    key_ok = key_ok.repeat_interleave(groups, dim=2)
    ok = rearrange(query_ok, "b t n -> b n t 1") & rearrange(key_ok, "b s n -> b n 1 s")
    return (visible & ~ok).any(dim=-1, keepdim=True)
