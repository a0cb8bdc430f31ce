"""The linear layer that every projection is made of."""

import torch
from torch import nn

from attn_spec.checks import check_positive
from torch_ref.modules.typed import TypedModule


class Linear(TypedModule, nn.Linear):
    """`x @ weight^T + bias`: `torch.nn.Linear`, which draws both uniform in +-1 / sqrt(d_in).

    Shapes:
        `(..., d_in)` to `(..., d_out)`; weight `(d_out, d_in)`, bias `(d_out,)`.

    Raises:
        ValueError: if a width is not a positive integer.

    Example:
        >>> import torch
        >>> Linear(3, 2)(torch.ones((5, 3))).shape
        torch.Size([5, 2])
    """

    def __init__(self, d_in: int, d_out: int, bias: bool = True):
        # torch itself takes a width of 0, and warns that there is nothing to draw.
        check_positive(d_in=d_in, d_out=d_out)
        super().__init__(d_in, d_out, bias)

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of the output for an input in the dtype of the parameters."""
        return self.weight.dtype
