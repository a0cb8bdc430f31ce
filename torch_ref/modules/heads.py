"""Norms and gates of attention heads."""

from collections.abc import Callable

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from torch_ref.functional.dtypes import accumulation_dtype

Norm = Callable[[Tensor], Tensor]
GATES = ("features", "heads")


def norm_heads(norm: Norm | None, x: Float[Tensor, "*b t n h"]) -> Float[Tensor, "*b t n h"]:
    """Return heads after a norm over each head, or over all heads joined.

    The norm is over each head if it is as wide as one, and over all heads joined otherwise.

    Example:
        >>> from torch_ref import RMSNorm
        >>> x = torch.arange(1.0, 7.0).reshape(1, 2, 3)
        >>> each, together = (norm_heads(RMSNorm(width), x) for width in (3, 6))
        >>> torch.allclose(each, together)
        False
    """
    if norm is None:
        return x
    # By the width, as OLMo 2 has one norm over all heads where Qwen 3 has one over each.
    if getattr(norm, "d_model", None) == x.shape[-1]:
        return norm(x)
    joined = rearrange(x, "... n h -> ... (n h)")
    return rearrange(norm(joined), "... (n h) -> ... n h", n=x.shape[-2])


def gate_heads(
    gate: Float[Tensor, "*b t gates"], x: Float[Tensor, "*b t n h"]
) -> Float[Tensor, "*b t n h"]:
    """Return `sigmoid(gate) * x`, the sigmoid in at least float32.

    Example:
        >>> gate_heads(torch.zeros((1, 2)), torch.ones((1, 2, 3))).tolist()
        [[[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]]
    """
    wide = accumulation_dtype(x.dtype)
    opened = torch.sigmoid(rearrange(gate, "... t (n h) -> ... t n h", n=x.shape[-2]).to(wide))
    return (opened * x.to(wide)).to(x.dtype)
