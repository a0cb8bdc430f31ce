"""The linear layer whose matrix is held in 8 bits, for generating."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attn_spec.checks import check_width
from torch_ref.functional.dtypes import accumulation_dtype
from torch_ref.modules.typed import TypedModule


class QuantizedLinear(TypedModule):
    """`(x @ weight^T) * scale + bias`, where `weight` is int8 and each row has its scale.

        scale_j = max_i |matrix_ij| / 127
        weight_ji = round(matrix_ij / scale_j)

    The input is not quantized. The product is summed in at least float32, and rounded once, after
    the bias.

    Args:
        matrix: matrix of floats that is quantized.
        bias: bias, kept as it is; None is none.

    Shapes:
        matrix `(d_in, d_out)`, weight `(d_out, d_in)`, scale and bias `(d_out,)`; `(..., d_in)` to
        `(..., d_out)`.

    Raises:
        ValueError: if the matrix does not have two axes, or the input has another width.

    Example:
        >>> layer = QuantizedLinear(torch.tensor([[1.0, 20.0], [-0.5, 127.0]]))
        >>> layer.weight.tolist()
        [[127, -64], [20, 127]]

    References:
        Dettmers et al. 2022 (arXiv:2208.07339), section 2.1, without its vectors of the input.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, matrix: Tensor, bias: Float[Tensor, " d_out"] | None = None):
        super().__init__()
        if matrix.ndim != 2:
            raise ValueError(
                "matrix must have two axes, (d_in, d_out), whose columns are quantized one by one;"
                f" got {tuple(matrix.shape)}. Pass the transposed weight of one layer"
            )
        self.d_in = len(matrix)
        self._dtype = matrix.dtype
        dtype = accumulation_dtype(matrix.dtype)
        wide = matrix.detach().T.to(dtype)
        largest = wide.abs().amax(dim=1)
        # A column of zeros stays one.
        scale = torch.where(largest == 0, 1, largest / 127)
        self.register_buffer("weight", (wide / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = None if bias is None else nn.Parameter(bias.detach())

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of the output for an input in the dtype of the parameters."""
        return self._dtype

    def forward(self, x: Float[Tensor, "*shape d_in"]) -> Float[Tensor, "*shape d_out"]:
        check_width("x", x, "d_in", self.d_in)
        dtype = torch.promote_types(x.dtype, self.result_dtype)
        wide = accumulation_dtype(dtype)
        # The scale of a column multiplies its sum, not each of its numbers.
        matrix = self.weight.to(wide).T
        sums = x.to(wide) @ matrix
        found = sums * self.scale.to(wide)
        if self.bias is not None:
            # Added before the one rounding of the result.
            found = found + self.bias.to(wide)
        return found.to(dtype)
