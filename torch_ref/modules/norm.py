"""Layer norm and RMS norm."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attn_spec.checks import check_eps, check_positive, check_width
from torch_ref.functional.dtypes import accumulation_dtype
from torch_ref.modules.typed import TypedModule


class LayerNorm(TypedModule):
    """`(x - mean) / sqrt(var + eps) * scale + shift` over the last axis.

    The variance is the mean of `(x - mean)^2`, in two passes: `mean(x^2) - mean(x)^2` loses all
    digits where the mean is large. Statistics are taken in at least float32.

    Shapes:
        `(..., d_model)`, kept; `scale` and `shift` are `(d_model,)` and start at 1 and 0.

    Example:
        >>> LayerNorm(4, eps=0.0)(torch.tensor([1000.0, 1000.0, 1002.0, 1002.0]))
        tensor([-1., -1.,  1.,  1.], grad_fn=<AddBackward0>)
    """

    def __init__(self, d_model: int, eps: float = 1e-5, bias: bool = True):
        super().__init__()
        check_positive(d_model=d_model)
        check_eps(eps)
        self.d_model, self.eps = d_model, eps
        self.scale = nn.Parameter(torch.ones(d_model))
        self.shift = nn.Parameter(torch.zeros(d_model)) if bias else None

    def forward(self, x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape d"]:
        check_width("x", x, "d_model", self.d_model)
        dtype = torch.promote_types(x.dtype, self.scale.dtype)
        x = x.to(accumulation_dtype(x.dtype))
        # What is left is centred, so that the mean of its squares is the variance.
        x = x - x.mean(dim=-1, keepdim=True)
        x = rms_normed(x, self.eps)
        x = x * self.scale
        if self.shift is not None:
            x = x + self.shift
        return x.to(dtype)


class RMSNorm(TypedModule):
    """`x / sqrt(mean(x^2) + eps) * scale` over the last axis, the mean taken in at least float32.

    With `zero_centred` the factor is `1 + scale`, as in Gemma: what weight decay pulls to 0 is the
    difference from 1.

    Shapes:
        `(..., d_model)`, kept; `scale` is `(d_model,)` and starts at 1, or at 0 if it is
        zero-centred.

    Example:
        >>> RMSNorm(4, eps=0.0)(torch.tensor([2.0, -2.0, 2.0, 2.0]))
        tensor([ 1., -1.,  1.,  1.], grad_fn=<MulBackward0>)
    """

    def __init__(self, d_model: int, eps: float = 1e-5, *, zero_centred: bool = False):
        super().__init__()
        check_positive(d_model=d_model)
        check_eps(eps)
        self.d_model, self.eps, self.zero_centred = d_model, eps, zero_centred
        self.scale = nn.Parameter(torch.zeros(d_model) if zero_centred else torch.ones(d_model))

    def forward(self, x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape d"]:
        check_width("x", x, "d_model", self.d_model)
        dtype = torch.promote_types(x.dtype, self.scale.dtype)
        x = rms_normed(x.to(accumulation_dtype(x.dtype)), self.eps)
        factor = 1 + self.scale if self.zero_centred else self.scale
        return (x * factor).to(dtype)


def rms_normed(x: Float[Tensor, "*shape d"], eps: float) -> Float[Tensor, "*shape d"]:
    """Return `x / sqrt(mean(x^2) + eps)` over the last axis, in the dtype of x.

    Example:
        >>> rms_normed(torch.tensor([2.0, -2.0, 2.0, 2.0]), 0.0).tolist()
        [1.0, -1.0, 1.0, 1.0]
    """
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
