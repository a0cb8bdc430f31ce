"""Layer norm and RMS norm."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jaxtyping import Array, Float

from attn_spec.checks import check_eps, check_positive, check_width
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.modules.initialisation import check_dtypes, filled
from flax_attn.sharding.parameters import named


class LayerNorm(nnx.Module):
    """`(x - mean) / sqrt(var + eps) * scale + shift` over the last axis.

    The variance is the mean of `(x - mean)^2`, in two passes: `mean(x^2) - mean(x)^2` loses all
    digits where the mean is large. Statistics are taken in at least float32.

    Args:
        d_model: width of the input.
        eps: added to the variance.
        bias: whether there is a shift.
        dtype: dtype of the output; None promotes the dtypes of the input and the parameters.
        param_dtype: dtype of the parameters.
        rngs: not used; accepted so that every layer is built alike.

    Shapes:
        `(..., d_model)`, kept; `scale` and `shift` are `(d_model,)` and start at 1 and 0.

    Raises:
        ValueError: if `d_model` is not positive, `eps` is negative, or the input has another width.

    Example:
        >>> LayerNorm(4, eps=0.0)(jnp.array([1000.0, 1000.0, 1002.0, 1002.0]))
        Array([-1., -1.,  1.,  1.], dtype=float32)

    References:
        Ba et al. 2016 (arXiv:1607.06450).
    """

    def __init__(
        self,
        d_model: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        del rngs
        check_positive(d_model=d_model)
        check_eps(eps)
        check_dtypes(dtype=dtype, param_dtype=param_dtype)
        self.d_model, self.eps, self.dtype = d_model, eps, dtype
        self.scale = nnx.Param(filled(d_model, 1, param_dtype), **named(None))
        self.shift = nnx.Param(filled(d_model, 0, param_dtype), **named(None)) if bias else None

    def __call__(self, x: Float[Array, "*shape d"]) -> Float[Array, "*shape d"]:
        check_width("x", x, "d_model", self.d_model)
        scale = self.scale[...]
        dtype = _output_dtype(self.dtype, x, scale)
        x = x.astype(accumulation_dtype(x.dtype))
        # What is left is centred, so that the mean of its squares is the variance.
        x = x - x.mean(axis=-1, keepdims=True)
        x = rms_normed(x, self.eps)
        x = x * _along(x, scale)
        if self.shift is not None:
            x = x + _along(x, self.shift[...])
        return x.astype(dtype)


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps) * scale` over the last axis, the mean taken in at least float32.

    With `zero_centred` the factor is `1 + scale`, as in Gemma: what weight decay pulls to 0 is the
    difference from 1.

    Args:
        d_model: width of the input.
        eps: added to the mean square.
        zero_centred: whether the factor is `1 + scale` and not `scale`.
        dtype: dtype of the output; None promotes the dtypes of the input and the parameters.
        param_dtype: dtype of the parameters.
        rngs: not used; accepted so that every layer is built alike.

    Shapes:
        `(..., d_model)`, kept; `scale` is `(d_model,)` and starts at 1, or at 0 if it is
        zero-centred.

    Raises:
        ValueError: if `d_model` is not positive, `eps` is negative, or the input has another width.

    Example:
        >>> RMSNorm(4, eps=0.0)(jnp.array([2.0, -2.0, 2.0, 2.0]))
        Array([ 1., -1.,  1.,  1.], dtype=float32)

    References:
        Zhang and Sennrich 2019 (arXiv:1910.07467); Gemma Team 2024, zero-centred
        (arXiv:2403.08295).
    """

    def __init__(
        self,
        d_model: int,
        eps: float = 1e-5,
        *,
        zero_centred: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        del rngs
        check_positive(d_model=d_model)
        check_eps(eps)
        check_dtypes(dtype=dtype, param_dtype=param_dtype)
        self.d_model, self.eps, self.zero_centred, self.dtype = d_model, eps, zero_centred, dtype
        scale = filled(d_model, 0 if zero_centred else 1, param_dtype)
        self.scale = nnx.Param(scale, **named(None))

    def __call__(self, x: Float[Array, "*shape d"]) -> Float[Array, "*shape d"]:
        check_width("x", x, "d_model", self.d_model)
        dtype = _output_dtype(self.dtype, x, self.scale[...])
        x = rms_normed(x.astype(accumulation_dtype(x.dtype)), self.eps)
        scale = self.scale[...].astype(x.dtype)
        # 1 is added in the dtype of the computation: a lower one has few digits near 1.
        factor = 1 + scale if self.zero_centred else scale
        return (x * _along(x, factor)).astype(dtype)


def rms_normed(x: Float[Array, "*shape d"], eps: float) -> Float[Array, "*shape d"]:
    """Return `x / sqrt(mean(x^2) + eps)` over the last axis, in the dtype of x.

    Example:
        >>> rms_normed(jnp.array([2.0, -2.0, 2.0, 2.0]), 0.0).tolist()
        [1.0, -1.0, 1.0, 1.0]
    """
    return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + eps)


def _along(x: Array, vector: Array) -> Array:
    # By hand: numbers of different ranks are an error where promotion of ranks is forbidden.
    return jnp.broadcast_to(vector.astype(x.dtype), x.shape)


def _output_dtype(dtype: Dtype | None, x: Array, scale: Array) -> Dtype:
    return jnp.result_type(x, scale) if dtype is None else dtype
