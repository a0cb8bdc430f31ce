"""The linear layer whose matrix is held in 8 bits, for generating."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Float

from attn_spec.checks import check_width
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.modules.initialisation import check_dtypes
from flax_attn.modules.matrix_product import dot_general, int8_matmul
from flax_attn.sharding.axes import mesh_of
from flax_attn.sharding.parameter_axes import ON_ONE_DEVICE, check_may_split


class _Quantized(nnx.BatchStat):
    """An array of a quantized layer: stored like a parameter, and not trained."""


class QuantizedLinear(nnx.Module):
    """`(x @ kernel) * scale + bias`, where `kernel` is int8 and each column has its scale.

        scale_j = max_i |matrix_ij| / 127
        kernel_ij = round(matrix_ij / scale_j)

    `kernel * scale` differs from the matrix by at most `scale_j / 2` in column j, and the output
    from the unquantized one by at most `scale_j / 2 * sum_i |x_i|`. The input is not quantized.
    The product is summed in at least float32, and rounded once, after the bias.

    Args:
        matrix: matrix of floats that is quantized.
        bias: bias, kept as it is; None is none.
        dtype: dtype of the computation; None promotes the dtypes of the input and the matrix.
        precision: precision of the matrix product, as in `jax.lax.dot_general`.

    Shapes:
        matrix and kernel `(d_in, d_out)`, scale and bias `(d_out,)`; `(..., d_in)` to
        `(..., d_out)`.

    Raises:
        ValueError: if the matrix does not have two axes, the input has another width, or a mesh
            would split the layer.

    Example:
        >>> layer = QuantizedLinear(jnp.array([[1.0, 20.0], [-0.5, 127.0]]))
        >>> layer.kernel[...].tolist()
        [[127, 20], [-64, 127]]
        >>> layer(jnp.array([0.0, 2.0])).round().tolist()
        [-1.0, 254.0]

    References:
        Dettmers et al. 2022 (arXiv:2208.07339), section 2.1, without its vectors of the input.
    """

    def __init__(
        self,
        matrix: Array,
        bias: Float[Array, " d_out"] | None = None,
        *,
        dtype: Dtype | None = None,
        precision: PrecisionLike = None,
    ):
        check_dtypes(dtype=dtype)
        if matrix.ndim != 2:
            raise ValueError(
                "matrix must have two axes, (d_in, d_out), whose columns are quantized one by one;"
                f" got {matrix.shape}. Pass the kernel of one layer"
            )
        self.d_in = len(matrix)
        self.dtype = dtype
        self.param_dtype = matrix.dtype
        self.precision = precision
        self.dot_general = dot_general
        wide = matrix.astype(accumulation_dtype(matrix.dtype))
        largest = jnp.max(jnp.abs(wide), axis=0, initial=0)
        # A column of zeros stays one.
        scale = jnp.where(largest == 0, 1, largest / 127)
        kernel = jnp.round(wide / scale[None])
        # So that `shard` refuses what a call on a mesh would.
        whole: dict[str, Any] = {ON_ONE_DEVICE: "QuantizedLinear"}
        self.kernel = _Quantized(kernel.astype(jnp.int8), **whole)
        self.scale = _Quantized(scale)
        self.bias = None if bias is None else nnx.Param(bias)

    @property
    def result_dtype(self) -> Dtype:
        """The dtype of the output for an input in the dtype of the parameters."""
        return self.param_dtype if self.dtype is None else self.dtype

    def __call__(self, x: Float[Array, "*shape d_in"]) -> Float[Array, "*shape d_out"]:
        check_width("x", x, "d_in", self.d_in)
        kernel = self.kernel[...]
        mesh = mesh_of(x, kernel)
        check_may_split("QuantizedLinear", mesh)
        dtype = self.dtype
        if dtype is None:
            dtype = jnp.result_type(x, self.param_dtype)
        x = x.astype(dtype)
        native = self.dot_general is dot_general
        found = int8_matmul(x, kernel, native=native, precision=self.precision)
        # The scale of a column multiplies its sum, not each of its numbers.
        found *= _spread(self.scale[...], found)
        if self.bias is not None:
            # Added before the one rounding of the result.
            found += _spread(self.bias[...], found)
        return found.astype(dtype)


def _spread(row: Array, x: Array) -> Array:
    """Return a row for each token of `x`, in its dtype."""
    row = row.astype(x.dtype)
    return jnp.broadcast_to(row, x.shape)
