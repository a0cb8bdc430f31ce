"""The linear layer whose matrix is held in 8 or 4 bits, for generating."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Float

from attn_spec.checks import check_width
from flax_attn.functional.quantized import QuantizedMatrix, to_int8
from flax_attn.modules.initialisation import check_dtypes
from flax_attn.modules.matrix_product import dot_general, quantized_matmul
from flax_attn.sharding.axes import mesh_of
from flax_attn.sharding.parameter_axes import ON_ONE_DEVICE, check_may_split


class _Quantized(nnx.BatchStat):
    """An array of a quantized layer: stored like a parameter, and not trained."""


class QuantizedLinear(nnx.Module):
    """`x @ matrix^T + bias`, where the matrix is held in 8 or 4 bits, with a scale for each block.

    A matrix of floats is held in int8, each column with its scale:

        scale_j = max_i |matrix_ij| / 127
        weight_ji = round(matrix_ij / scale_j)

    `weight * scale` then differs from the matrix by at most `scale_j / 2` in column j, and the
    output from the unquantized one by at most `scale_j / 2 * sum_i |x_i|`. The input is not
    quantized. The product is summed in at least float32, and rounded once, after the bias. On CPUs
    the library multiplies up to 16 tokens by the matrix as it is held. Else the matrix is widened
    to the dtype of the tokens while it is used.

    Args:
        matrix: matrix of floats that is quantized, or one that is quantized already.
        bias: bias, kept as it is; None is none.
        dtype: dtype of the computation; None promotes the dtypes of the input and the matrix.
        precision: precision of the matrix product, as in `jax.lax.dot_general`.

    Shapes:
        matrix of floats `(d_in, d_out)`, weight `(d_out, d_in)` or as in `QuantizedMatrix`, bias
        `(d_out,)`; `(..., d_in)` to `(..., d_out)`. With an axis of layers before the others, as in
        `Experts`, the input has it too.

    Raises:
        ValueError: if a matrix of floats does not have two axes, a block has no scale, the input
            has another width, or a mesh would split the layer.

    Example:
        >>> layer = QuantizedLinear(jnp.array([[1.0, 20.0], [-0.5, 127.0]]))
        >>> layer.weight[...].tolist()
        [[127, -64], [20, 127]]
        >>> layer(jnp.array([0.0, 2.0])).round().tolist()
        [-1.0, 254.0]

    References:
        Dettmers et al. 2022 (arXiv:2208.07339), section 2.1, without its vectors of the input.
    """

    def __init__(
        self,
        matrix: Array | QuantizedMatrix,
        bias: Float[Array, "*lead d_out"] | None = None,
        *,
        dtype: Dtype | None = None,
        precision: PrecisionLike = None,
    ):
        check_dtypes(dtype=dtype)
        if not isinstance(matrix, QuantizedMatrix):
            if matrix.ndim != 2:
                raise ValueError(
                    "matrix must have two axes, (d_in, d_out), whose columns are quantized one by"
                    f" one; got {matrix.shape}. Pass the kernel of one layer"
                )
            matrix = to_int8(matrix.T)
        matrix.check()
        self.d_in, self.block = matrix.d_in, matrix.block
        self.dtype = dtype
        self.param_dtype = matrix.dtype
        self.precision = precision
        self.dot_general = dot_general
        # So that `shard` refuses what a call on a mesh would.
        whole: dict[str, Any] = {ON_ONE_DEVICE: "QuantizedLinear"}
        self.weight = _Quantized(matrix.weight, **whole)
        self.scale = _Quantized(matrix.scale)
        self.bias = None if bias is None else nnx.Param(bias)

    @property
    def matrix(self) -> QuantizedMatrix:
        """The matrix as it is held."""
        weight, scale = self.weight[...], self.scale[...]
        return QuantizedMatrix(weight, scale, self.block, self.param_dtype)

    @property
    def result_dtype(self) -> Dtype:
        """The dtype of the output for an input in the dtype of the parameters."""
        return self.param_dtype if self.dtype is None else self.dtype

    def __call__(self, x: Float[Array, "*shape d_in"]) -> Float[Array, "*shape d_out"]:
        check_width("x", x, "d_in", self.d_in)
        matrix = self.matrix
        check_may_split("QuantizedLinear", mesh_of(x, matrix.weight))
        dtype = self.dtype
        if dtype is None:
            dtype = jnp.result_type(x, self.param_dtype)
        *shape, _ = x.shape
        *lead, _, _ = matrix.weight.shape
        # With an axis of layers each has its own tokens.
        tokens = x.astype(dtype).reshape(*lead, -1, self.d_in)
        native = self.dot_general is dot_general
        found = quantized_matmul(tokens, matrix, native=native, precision=self.precision)
        if self.bias is not None:
            # Added before the one rounding of the result.
            bias = self.bias[...].astype(found.dtype)
            by_token = bias[..., None, :]
            found += jnp.broadcast_to(by_token, found.shape)
        found = found.astype(dtype)
        return found.reshape(*shape, matrix.d_out)
