"""The two routes to causal attention weights, which give the same numbers."""

import torch
from jaxtyping import Float
from torch import Tensor

from torch_ref.functional.causal_mask import create_causal_mask


def causal_softmax_masked(scores: Float[Tensor, "*b t t"]) -> Float[Tensor, "*b t t"]:
    """Mask first: `softmax(scores with -inf above the diagonal)`.

    Example:
        >>> causal_softmax_masked(torch.zeros((2, 2)))
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
    """
    masked = torch.where(_diagonal_and_below(scores), scores, -torch.inf)
    return torch.softmax(masked, dim=-1)


def causal_softmax_renormalized(scores: Float[Tensor, "*b t t"]) -> Float[Tensor, "*b t t"]:
    """Softmax first: zero above the diagonal, then divide each row by its sum.

    Equal to `causal_softmax_masked` as long as the softmax of what is kept does not underflow: the
    sum of the hidden terms cancels. Prefer the mask: a large score above the diagonal leaves this
    route 0 / 0.

    Example:
        >>> causal_softmax_renormalized(torch.zeros((2, 2)))
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
    """
    # What is hidden is part of this sum, and cancels below.
    weights = torch.softmax(scores, dim=-1)
    kept = torch.where(_diagonal_and_below(scores), weights, 0)
    return kept / kept.sum(dim=-1, keepdim=True)


def _diagonal_and_below(scores):
    return create_causal_mask(scores.shape[-1]).to(scores.device)
