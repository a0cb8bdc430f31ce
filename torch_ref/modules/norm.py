"""Layer norm and RMS norm."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torch_ref.functional.checks import check_eps, check_positive, check_width
from torch_ref.functional.dtypes import accumulation_dtype
from torch_ref.modules.typed import TypedModule


class LayerNorm(TypedModule):
    """`(x - mean) / sqrt(var + eps) * scale + shift` over the last axis.

    The variance is the mean of `(x - mean)^2`, in two passes: `mean(x^2) - mean(x)^2` loses all digits where the
    mean is large. Statistics are taken in at least float32.

    Args:
        d_model: width of the input.
        eps: added to the variance.

    Shapes:
        `(..., d_model)`, kept; `scale` and `shift` are `(d_model,)` and start at 1 and 0.

    Raises:
        ValueError: if `d_model` is not positive, `eps` is negative, or the input has another width.

    Example:
        >>> LayerNorm(4, eps=0.0)(torch.tensor([1000.0, 1000.0, 1002.0, 1002.0]))
        tensor([-1., -1.,  1.,  1.], grad_fn=<AddBackward0>)

    References:
        Ba et al. 2016 (arXiv:1607.06450).
    """

    def __init__(self, d_model: int, eps: float = 1e-5):
        super().__init__()
        check_positive(d_model=d_model)
        check_eps(eps)
        self.d_model, self.eps = d_model, eps
        self.scale = nn.Parameter(torch.ones(d_model))
        self.shift = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape d"]:
        check_width("x", tuple(x.shape), "d_model", self.d_model)
        dtype = torch.promote_types(x.dtype, self.scale.dtype)
        x = x.to(accumulation_dtype(x.dtype))
        x = x - x.mean(dim=-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)
        return (x * self.scale + self.shift).to(dtype)


class RMSNorm(TypedModule):
    """`x / sqrt(mean(x^2) + eps) * scale` over the last axis, the mean taken in at least float32.

    Args:
        d_model: width of the input.
        eps: added to the mean square.

    Shapes:
        `(..., d_model)`, kept; `scale` is `(d_model,)` and starts at 1.

    Raises:
        ValueError: if `d_model` is not positive, `eps` is negative, or the input has another width.

    Example:
        >>> RMSNorm(4, eps=0.0)(torch.tensor([2.0, -2.0, 2.0, 2.0]))
        tensor([ 1., -1.,  1.,  1.], grad_fn=<MulBackward0>)

    References:
        Zhang and Sennrich 2019 (arXiv:1910.07467).
    """

    def __init__(self, d_model: int, eps: float = 1e-5):
        super().__init__()
        check_positive(d_model=d_model)
        check_eps(eps)
        self.d_model, self.eps = d_model, eps
        self.scale = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape d"]:
        check_width("x", tuple(x.shape), "d_model", self.d_model)
        dtype = torch.promote_types(x.dtype, self.scale.dtype)
        x = x.to(accumulation_dtype(x.dtype))
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)
        return (x * self.scale).to(dtype)
