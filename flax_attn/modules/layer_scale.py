"""A learned factor for each feature of what a layer adds to the residual."""

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jaxtyping import Array, Float

from attn_spec.checks import check_positive, check_width
from flax_attn.functional.parameter_sums import spread, widened
from flax_attn.modules.initialisation import check_dtypes, filled
from flax_attn.sharding.parameters import named


class LayerScale(nnx.Module):
    """`x * scale` over the last axis; stands where a `TransformerBlock` has its post norms.

    Args:
        d_model: width of the input.
        initial: initial value of the scale.
        dtype: dtype of the output; None promotes the dtypes of the input and the parameters.
        param_dtype: dtype of the parameters.
        rngs: not used; accepted so that every layer is built alike.

    Shapes:
        `(..., d_model)`, kept; `scale` is `(d_model,)`.

    Raises:
        ValueError: if `d_model` is not positive, or the input has another width.

    Example:
        >>> LayerScale(2, 0.5)(jnp.array([1.0, 4.0]))
        Array([0.5, 2. ], dtype=float32)

    References:
        Touvron et al. 2021 (arXiv:2103.17239).
    """

    def __init__(
        self,
        d_model: int,
        initial: float = 1.0,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        del rngs
        check_positive(d_model=d_model)
        check_dtypes(dtype=dtype, param_dtype=param_dtype)
        self.d_model, self.dtype = d_model, dtype
        # It starts small where a model is deep: each layer then adds little at first.
        self.scale = nnx.Param(filled(d_model, initial, param_dtype), **named(None))

    def __call__(self, x: Float[Array, "*shape d"]) -> Float[Array, "*shape d"]:
        # Another width of 1 would broadcast.
        check_width("x", x, "d_model", self.d_model)
        dtype = jnp.result_type(x, self.scale[...]) if self.dtype is None else self.dtype
        scale = spread(self.scale[...].astype(dtype), x.shape)
        return (widened(x.astype(dtype)) * scale).astype(dtype)
