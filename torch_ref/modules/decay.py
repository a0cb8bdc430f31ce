"""How fast a recurrent attention forgets."""

import math

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from attn_spec.checks import check_positive
from torch_ref.functional.dtypes import accumulation_dtype
from torch_ref.modules.typed import TypedModule


class DecayRate(TypedModule):
    """The logarithm of a decay, `-exp(A_log) * softplus(x + dt_bias)`, in at least float32.

    Shapes:
        `(..., num_heads * size)` to `(..., num_heads, size)`; `A_log` is `(num_heads,)`, `dt_bias`
        is `(num_heads * size,)`. They start as in Mamba: `exp(A_log)` between 1 and 16,
        `softplus(dt_bias)` between 0.001 and 0.1.

    Example:
        >>> DecayRate(2, 3)(torch.ones((4, 6))).shape
        torch.Size([4, 2, 3])
    """

    def __init__(self, num_heads: int, size: int = 1):
        super().__init__()
        check_positive(num_heads=num_heads, size=size)
        self.num_heads = num_heads
        low, high = math.log(0.001), math.log(0.1)
        rate = torch.empty(num_heads).uniform_(1.0, 16.0)
        step = torch.empty(num_heads * size).uniform_(low, high).exp()
        # Logarithms, as what is learned may then be any number, and the rate stays positive.
        self.A_log = nn.Parameter(rate.log())
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))

    def forward(self, x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape n s"]:
        x = x.to(accumulation_dtype(x.dtype))
        # By default torch returns its input above 20.
        step = functional.softplus(x + self.dt_bias.to(x.dtype), threshold=1000.0)
        step = rearrange(step, "... (n s) -> ... n s", n=self.num_heads)
        return -self.A_log.to(x.dtype).exp()[:, None] * step
