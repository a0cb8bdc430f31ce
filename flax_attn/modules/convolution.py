"""A convolution over tokens, as one product of their windows with a matrix."""

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Float

from attn_spec.checks import check_odd, check_positive, check_tokens
from flax_attn.modules.linear import Linear


class Convolution(nnx.Module):
    """`proj` of every `stride`-th window of `width` tokens, with zero padding on either side.

    This product is a convolution: `proj` holds its weight `(d_model, channels, width)` as a matrix
    of `channels * width` rows.

    Args:
        channels: width of the input.
        d_model: width of the output.
        width: width of a window in tokens; odd.
        stride: distance between windows in tokens.
        dtype: dtype of the computation; None promotes the dtypes of the input and the parameters.
        param_dtype: dtype of the parameters.
        precision: precision of the matrix product, as in `jax.lax.dot_general`.
        rngs: random streams; parameters are drawn from `params`, with the distribution of
            `torch.nn.Linear`.

    Shapes:
        `(b, t, channels)` or without b to `(b, t / stride, d_model)`, rounded up.

    Raises:
        ValueError: if a size is not positive or `width` is even; in the call, if the input has
            another rank or width.

    Example:
        >>> Convolution(3, 4, 3, 2, rngs=nnx.Rngs(0))(jnp.ones((2, 7, 3))).shape
        (2, 4, 4)

    References:
        Radford et al. 2022, Whisper (arXiv:2212.04356).
    """

    def __init__(
        self,
        channels: int,
        d_model: int,
        width: int,
        stride: int = 1,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        rngs: nnx.Rngs | None = None,
    ):
        check_positive(channels=channels, stride=stride)
        # An even kernel has no token in its middle, and would shift the output by half a step.
        check_odd(width=width)
        numerics = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "rngs": rngs,
        }
        self.channels, self.width, self.stride = channels, width, stride
        self.proj = Linear(channels * width, d_model, axes=(None, "embed"), **numerics)

    def __call__(self, x: Float[Array, "*b t c"]) -> Float[Array, "*b t2 d"]:
        check_tokens("x", x, "channels", self.channels, None)
        t, half = x.shape[-2], self.width // 2
        padded = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(half, half), (0, 0)])
        # A convolution is a linear layer of windows: its weight is that of PyTorch's, as a matrix.
        windows = [padded[..., i : i + t : self.stride, :] for i in range(self.width)]
        return self.proj(rearrange(jnp.stack(windows, axis=-1), "... t c k -> ... t (c k)"))
