"""Matrices that are held in 8 or 4 bits, with a scale for each block of numbers."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attn_spec.quantized import E2M1, check_blocks
from torch_ref.functional.dtypes import accumulation_dtype


@dataclass(frozen=True)
class QuantizedMatrix:
    """One matrix, or several, of numbers of 8 or 4 bits: `matrix_oi = weight_oi * scale_block`.

    The dtype of `weight` says what a number is:

    - int8: an integer.
    - float8_e4m3fn: a float with 4 bits of exponent and 3 of mantissa.
    - uint8: two floats with 2 bits of exponent and 1 of mantissa (E2M1), that of the lower bits
      first. Its scale is uint8 too, `2^(scale - 127)` (E8M0), and 255 stands for NaN.

    Shapes:
        weight `(..., d_out, d_in)`, of uint8 `(..., d_out, d_in / 2)`; scale
        `(..., ceil(d_out / block[0]), ceil(d_in / block[1]))`.

    Example:
        >>> weight = torch.tensor([[3, -4, 5]], dtype=torch.int8)
        >>> matrix = QuantizedMatrix(weight, torch.tensor([[0.5, 2.0]]), (1, 2), torch.float32)
        >>> matrix.floats().tolist()
        [[1.5, -2.0, 10.0]]
    """

    weight: Tensor
    scale: Tensor
    block: tuple[int, int]
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.weight)

    @property
    def d_in(self) -> int:
        """The width of what is multiplied by the matrix."""
        per_element = 2 if self.weight.dtype == torch.uint8 else 1
        return per_element * self.weight.shape[-1]

    @property
    def d_out(self) -> int:
        """The width of the product."""
        return self.weight.shape[-2]

    def check(self) -> None:
        """Raise unless there is a scale for each block."""
        sizes = self.d_out, self.d_in
        check_blocks(tuple(self.weight.shape), tuple(self.scale.shape), sizes, self.block)

    def floats(self, dtype: torch.dtype | None = None) -> Float[Tensor, "*lead d_out d_in"]:
        """Return the matrix in a dtype, None for its own: multiplied in at least float32."""
        dtype = self.dtype if dtype is None else dtype
        wide = accumulation_dtype(dtype)
        numbers = _numbers(self.weight, wide)
        scales = self._scales(wide)
        scaled = numbers * scales
        return scaled.to(dtype)

    def _scales(self, dtype: torch.dtype) -> Tensor:
        """Return the scale of each number."""
        scale = _powers(self.scale, dtype)
        height, width = self.block
        # A block may be larger than the matrix is, and the last one end beyond it.
        rows = scale.repeat_interleave(min(height, self.d_out), dim=-2)
        both = rows.repeat_interleave(min(width, self.d_in), dim=-1)
        return both[..., : self.d_out, : self.d_in]

    def kernels(self, dtype: torch.dtype) -> Float[Tensor, "*lead d_in d_out"]:
        """Return the matrix in a dtype, transposed."""
        return self.floats(dtype).mT


def to_int8(matrix: Float[Tensor, "d_out d_in"]) -> QuantizedMatrix:
    """Return a matrix as int8, with a scale for each row.

        scale_o = max_i |matrix_oi| / 127
        weight_oi = round(matrix_oi / scale_o)

    Example:
        >>> to_int8(torch.tensor([[1.0, -0.5], [20.0, 127.0]])).weight.tolist()
        [[127, -64], [20, 127]]
    """
    wide = matrix.detach().to(accumulation_dtype(matrix.dtype))
    scale = _largest(wide) / 127
    weight = (wide / scale).round()
    block = 1, matrix.shape[-1]
    return QuantizedMatrix(weight.to(torch.int8), scale, block, matrix.dtype)


def _largest(matrix: Tensor) -> Tensor:
    """Return the largest size in each row; for a row of zeros, which stays one, 127."""
    largest = matrix.abs().amax(dim=-1, keepdim=True)
    return torch.where(largest == 0, 127, largest)


def _numbers(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers without their scale."""
    if weight.dtype != torch.uint8:
        return weight.to(dtype)
    table = torch.tensor(E2M1, dtype=dtype, device=weight.device)
    pairs = torch.stack([weight & 15, weight >> 4], dim=-1)
    return table[pairs.long()].flatten(-2)


def _powers(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales in a dtype: of bytes the powers of two that they stand for."""
    if scale.dtype != torch.uint8:
        return scale.to(dtype)
    power = torch.exp2(scale.to(torch.float64) - 127)
    return torch.where(scale == 255, torch.nan, power).to(dtype)
