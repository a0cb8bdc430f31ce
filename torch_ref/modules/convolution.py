"""A convolution over tokens, as one product of their windows with a matrix."""

from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from attn_spec.checks import check_odd, check_positive, check_tokens
from torch_ref.modules.linear import Linear
from torch_ref.modules.typed import TypedModule


class Convolution(TypedModule):
    """`proj` of every `stride`-th window of `width` tokens, with zero padding on either side.

    This product is a convolution: `proj` holds its weight `(d_model, channels, width)` as a matrix
    of `channels * width` rows.

    Shapes:
        `(b, t, channels)` or without b to `(b, t / stride, d_model)`, rounded up.

    Example:
        >>> import torch
        >>> Convolution(3, 4, 3, 2)(torch.ones((2, 7, 3))).shape
        torch.Size([2, 4, 4])
    """

    def __init__(self, channels: int, d_model: int, width: int, stride: int = 1):
        super().__init__()
        check_positive(channels=channels, stride=stride)
        # An even kernel has no token in its middle, and would shift the output by half a step.
        check_odd(width=width)
        self.channels, self.width, self.stride = channels, width, stride
        self.proj = Linear(channels * width, d_model)

    def forward(self, x: Float[Tensor, "*b t c"]) -> Float[Tensor, "*b t2 d"]:
        check_tokens("x", x, "channels", self.channels, None)
        # As many zeros on both sides: at a stride of 1 the output has as many tokens.
        windows = pad(x, (0, 0, self.width // 2, self.width // 2)).unfold(
            -2, self.width, self.stride
        )
        return self.proj(rearrange(windows, "... t c k -> ... t (c k)"))
