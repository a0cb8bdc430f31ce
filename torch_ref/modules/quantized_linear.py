"""The linear layer whose matrix is held in 8 or 4 bits, for generating."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attn_spec.checks import check_width
from torch_ref.functional.dtypes import accumulation_dtype
from torch_ref.functional.quantized import QuantizedMatrix, to_int8
from torch_ref.modules.typed import TypedModule


class QuantizedLinear(TypedModule):
    """`x @ matrix^T + bias`, where the matrix is held in 8 or 4 bits, with a scale for each block.

    A matrix of floats is held in int8, each column with its scale:

        scale_j = max_i |matrix_ij| / 127
        weight_ji = round(matrix_ij / scale_j)

    The input is not quantized. The product is summed in at least float32, and rounded once, after
    the bias.

    Args:
        matrix: matrix of floats that is quantized, or one that is quantized already.
        bias: bias, kept as it is; None is none.

    Shapes:
        matrix of floats `(d_in, d_out)`, weight `(d_out, d_in)` or as in `QuantizedMatrix`, bias
        `(d_out,)`; `(..., d_in)` to `(..., d_out)`. With an axis of layers before the others, as in
        `Experts`, the input has it too.

    Raises:
        ValueError: if a matrix of floats does not have two axes, a block has no scale, or the input
            has another width.

    Example:
        >>> layer = QuantizedLinear(torch.tensor([[1.0, 20.0], [-0.5, 127.0]]))
        >>> layer.weight.tolist()
        [[127, -64], [20, 127]]

    References:
        Dettmers et al. 2022 (arXiv:2208.07339), section 2.1, without its vectors of the input.
    """

    weight: Tensor
    scale: Tensor

    def __init__(
        self, matrix: Tensor | QuantizedMatrix, bias: Float[Tensor, "*lead d_out"] | None = None
    ):
        super().__init__()
        if not isinstance(matrix, QuantizedMatrix):
            if matrix.ndim != 2:
                raise ValueError(
                    "matrix must have two axes, (d_in, d_out), whose columns are quantized one by"
                    f" one; got {tuple(matrix.shape)}. Pass the transposed weight of one layer"
                )
            matrix = to_int8(matrix.T)
        matrix.check()
        self.d_in, self.block = matrix.d_in, matrix.block
        # Of the numbers with their scales.
        self._dtype = matrix.dtype
        self.register_buffer("weight", matrix.weight)
        self.register_buffer("scale", matrix.scale)
        self.bias = None if bias is None else nn.Parameter(bias.detach())

    @property
    def matrix(self) -> QuantizedMatrix:
        """The matrix as it is held."""
        return QuantizedMatrix(self.weight, self.scale, self.block, self._dtype)

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of the output for an input in the dtype of the parameters."""
        return self._dtype

    def forward(self, x: Float[Tensor, "*shape d_in"]) -> Float[Tensor, "*shape d_out"]:
        check_width("x", x, "d_in", self.d_in)
        dtype = torch.promote_types(x.dtype, self.result_dtype)
        wide = accumulation_dtype(dtype)
        matrix = self.matrix
        *shape, _ = x.shape
        *lead, _, _ = matrix.weight.shape
        # With an axis of layers each has its own tokens.
        tokens = x.reshape(*lead, -1, self.d_in)
        found = tokens.to(wide) @ matrix.kernels(wide)
        if self.bias is not None:
            # Added before the one rounding of the result.
            bias = self.bias.to(wide)
            found = found + bias.unsqueeze(-2)
        found = found.reshape(*shape, matrix.d_out)
        return found.to(dtype)
