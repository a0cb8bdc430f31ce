"""The linear layer that every projection is made of."""

from functools import partial
from typing import Any, cast

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array

from attn_spec.checks import check_positive
from flax_attn.backends.call import check_precision
from flax_attn.backends.platform import platform_of
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.parameter_sums import spread
from flax_attn.modules.initialisation import check_dtypes, check_rngs, for_flax, redrawn, uniform
from flax_attn.modules.matrix_product import PRODUCTS, dot_general, unrounded
from flax_attn.sharding.parameters import named


class Linear(nnx.Linear):
    """`x @ kernel + bias`, initialised as in `torch.nn.Linear`.

    In a lower dtype the gradient of the bias is summed over tokens in float32, and the bias is
    added before the output is rounded; on GPUs that is up to XLA.

    Kernel and bias are uniform in +-1 / sqrt(d_in). The numbers are those of `jax.random.uniform`,
    whether the layer is built eagerly or under `jax.jit`; eagerly nothing is compiled for a shape.

    Args:
        d_in: width of the input.
        d_out: width of the output.
        bias: whether to add a bias.
        dtype: dtype of the computation; None promotes the dtypes of the input and the parameters.
        param_dtype: dtype of the parameters.
        precision: precision of the matrix product, as in `jax.lax.dot_general`.
        axes: names of the axes of the kernel, by which a mesh splits them. A bias over `"embed"` is
            whole everywhere.
        unit: how many elements along each axis of the kernel stay on one device, such as those of a
            head.
        rngs: random streams; parameters are drawn from `params`.

    Shapes:
        `(..., d_in)` to `(..., d_out)`; kernel `(d_in, d_out)`, bias `(d_out,)`.

    Raises:
        ValueError: if a width is not a positive integer, if `jax.lax.dot_general` does not take the
            precision, or if `rngs` is missing.

    Example:
        >>> Linear(3, 2, rngs=nnx.Rngs(0))(jnp.ones((5, 3))).shape
        (5, 2)
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        bias: bool = True,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        axes: tuple[str | None, str | None] = (None, None),
        unit: tuple[int, int] = (1, 1),
        rngs: nnx.Rngs | None = None,
    ):
        check_positive(d_in=d_in, d_out=d_out)
        check_dtypes(dtype=dtype, param_dtype=param_dtype)
        check_precision(precision)
        draw = redrawn(uniform(d_in))
        super().__init__(
            d_in,
            d_out,
            use_bias=bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=draw,
            bias_init=draw,
            dot_general=dot_general,
            rngs=cast(Any, for_flax(check_rngs(rngs))),
            kernel_metadata=named(*axes, unit=unit),
            # Split over devices that split the batch too, it would have to be gathered for each
            # sum.
            bias_metadata=named(None if axes[1] == "embed" else axes[1], unit=unit[1:]),
        )

    @property
    def result_dtype(self) -> Dtype:
        """The dtype of the output for an input in the dtype of the parameters."""
        return self.kernel.dtype if self.dtype is None else self.dtype

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        bias = None if self.bias is None else self.bias[...]
        operands = inputs, self.kernel[...], bias
        x, kernel, bias = self.promote_dtype(operands, dtype=self.dtype)
        # What somebody has set to a product of their own, or asked to be of a dtype, stays that.
        own = self.dot_general not in PRODUCTS or self.preferred_element_type is not None
        if bias is None or own or accumulation_dtype(x.dtype) == x.dtype:
            return super().__call__(inputs, out_sharding)
        multiply = partial(
            self.dot_general,
            dimension_numbers=(((x.ndim - 1,), (0,)), ((), ())),
            precision=self.precision,
            out_sharding=out_sharding,
        )
        # On GPUs the bias is added in the kernel of the product. XLA adds no float32 there: it
        # would be a kernel more, and three times the memory.
        if platform_of(x) == "gpu":
            product = multiply(x, kernel)
            return product + spread(bias, product.shape).astype(x.dtype)
        product = unrounded(multiply, x, kernel)
        product += spread(bias, product.shape)
        return product.astype(x.dtype)
