"""Matrices that are held in 8 or 4 bits, with a scale for each block of numbers."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype
from jaxtyping import Array, Float

from attn_spec.quantized import E2M1, check_blocks
from flax_attn.functional.dtypes import accumulation_dtype


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedMatrix:
    """One matrix, or several, of numbers of 8 or 4 bits: `matrix_oi = weight_oi * scale_block`.

    The dtype of `weight` says what a number is:

    - int8: an integer.
    - float8_e4m3fn: a float with 4 bits of exponent and 3 of mantissa.
    - uint8: two floats with 2 bits of exponent and 1 of mantissa (E2M1), that of the lower bits
      first. Its scale is uint8 too, `2^(scale - 127)` (E8M0), and 255 stands for NaN.

    Args:
        weight: numbers without their scale.
        scale: scale of each block; float32 or float64 unless it is uint8.
        block: rows and columns of a block; those at the ends may be smaller.
        dtype: dtype that the matrix stands for.

    Shapes:
        weight `(..., d_out, d_in)`, of uint8 `(..., d_out, d_in / 2)`; scale
        `(..., ceil(d_out / block[0]), ceil(d_in / block[1]))`.

    Example:
        >>> weight = jnp.array([[3, -4, 5]], jnp.int8)
        >>> matrix = QuantizedMatrix(weight, jnp.array([[0.5, 2.0]]), (1, 2), jnp.dtype("float32"))
        >>> matrix.floats().tolist()
        [[1.5, -2.0, 10.0]]

    References:
        DeepSeek-AI 2024, section 3.3 (arXiv:2412.19437); OCP Microscaling Formats (MX) v1.0, 2023.
    """

    weight: Array
    scale: Array
    block: tuple[int, int] = field(metadata={"static": True})
    dtype: Dtype = field(metadata={"static": True})

    def __len__(self) -> int:
        return len(self.weight)

    @property
    def d_in(self) -> int:
        """The width of what is multiplied by the matrix."""
        per_element = 2 if self.weight.dtype == jnp.uint8 else 1
        return per_element * self.weight.shape[-1]

    @property
    def d_out(self) -> int:
        """The width of the product."""
        return self.weight.shape[-2]

    def check(self) -> None:
        """Raise unless there is a scale for each block."""
        sizes = self.d_out, self.d_in
        check_blocks(self.weight.shape, self.scale.shape, sizes, self.block)

    def floats(self, dtype: Dtype | None = None) -> Float[Array, "*lead d_out d_in"]:
        """Return the matrix in a dtype, None for its own: multiplied in at least float32."""
        dtype = jnp.dtype(self.dtype if dtype is None else dtype)
        wide = accumulation_dtype(dtype)
        numbers = _numbers(self.weight, wide)
        scales = self._scales(wide)
        scaled = numbers * scales
        return scaled.astype(dtype)

    def _scales(self, dtype: Dtype) -> Array:
        """Return the scale of each number."""
        scale = _powers(self.scale, dtype)
        height, width = self.block
        # A block may be larger than the matrix is, and the last one end beyond it.
        rows = jnp.repeat(scale, min(height, self.d_out), axis=-2)
        both = jnp.repeat(rows, min(width, self.d_in), axis=-1)
        return both[..., : self.d_out, : self.d_in]

    def kernels(self, dtype: Dtype) -> Float[Array, "*lead d_in d_out"]:
        """Return the matrix in a dtype, as a layer of floats holds it."""
        return self.floats(dtype).mT


def to_int8(matrix: Float[Array, "d_out d_in"]) -> QuantizedMatrix:
    """Return a matrix as int8, with a scale for each row.

        scale_o = max_i |matrix_oi| / 127
        weight_oi = round(matrix_oi / scale_o)

    Example:
        >>> to_int8(jnp.array([[1.0, -0.5], [20.0, 127.0]])).weight.tolist()
        [[127, -64], [20, 127]]
    """
    wide = matrix.astype(accumulation_dtype(matrix.dtype))
    scale = _largest(wide) / 127
    weight = jnp.round(wide / scale)
    block = 1, matrix.shape[-1]
    return QuantizedMatrix(weight.astype(jnp.int8), scale, block, matrix.dtype)


def _largest(matrix: Array) -> Array:
    """Return the largest size in each row; for a row of zeros, which stays one, 127."""
    largest = jnp.max(jnp.abs(matrix), axis=-1, keepdims=True, initial=0)
    return jnp.where(largest == 0, 127, largest)


def _numbers(weight: Array, dtype: Dtype) -> Array:
    """Return the numbers without their scale."""
    if weight.dtype != jnp.uint8:
        return weight.astype(dtype)
    table = jnp.array(E2M1, dtype)
    # The lower bits are the first number.
    pairs = jnp.stack([weight & 15, weight >> 4], axis=-1)
    return table[pairs].reshape(*weight.shape[:-1], -1)


def _powers(scale: Array, dtype: Dtype) -> Array:
    """Return scales in a dtype: of bytes the powers of two that they stand for."""
    if scale.dtype != jnp.uint8:
        return scale.astype(dtype)
    # The last byte is no number.
    powers = np.append(np.exp2(np.arange(255.0) - 127), np.nan)
    return jnp.array(powers, dtype)[scale]
