"""The short convolution of a recurrent attention, and its activation."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from attn_spec.checks import check_positive
from torch_ref.functional.shapes import ArrayLike, Tokens
from torch_ref.functional.short_convolution import Convolved, short_convolution
from torch_ref.modules.typed import TypedModule


class ShortConvolution(TypedModule):
    """`silu(short_convolution(x, weight^T))`: causal, each feature for itself.

    Shapes:
        `(t, d_model)` or `(b, t, d_model)`, kept; weight `(d_model, kernel_size)`, drawn as in
        `torch.nn.Conv1d`.

    Example:
        >>> convolution = ShortConvolution(3, 4)
        >>> output, state = convolution(torch.ones((2, 5, 3)))
        >>> output.shape, state.shape
        (torch.Size([2, 5, 3]), torch.Size([2, 3, 3]))
    """

    def __init__(self, d_model: int, kernel_size: int = 4):
        super().__init__()
        check_positive(d_model=d_model, kernel_size=kernel_size)
        self.d_model, self.kernel_size = d_model, kernel_size
        bound = kernel_size**-0.5
        self.weight = nn.Parameter(torch.empty(d_model, kernel_size).uniform_(-bound, bound))

    def forward(
        self,
        x: Tokens,
        state: Float[Tensor, "*b before d"] | None = None,
        *,
        starts: Bool[Tensor, "*b t"] | None = None,
        lengths: ArrayLike | int | None = None,
    ) -> Convolved:
        """Return the output and the inputs that the next tokens need; see `short_convolution`."""
        # The state is what decoding needs: the last inputs before the next token.
        output, state = short_convolution(x, self.weight.T, state, starts=starts, lengths=lengths)
        return Convolved(functional.silu(output), state)
