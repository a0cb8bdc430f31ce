"""Images as tokens: the patches of an image, each made a vector by one matrix."""

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Float

from attn_spec.checks import check_positive
from attn_spec.input_checks import check_image
from flax_attn.modules.linear import Linear


class Patches(nnx.Module):
    """`proj(patch_i)`: the image cut into patches of `height * width` pixels, row by row.

    This product is a convolution with a stride of the kernel size: `proj` holds its weight
    `(d, c, height, width)` as a matrix of `c * height * width` rows.

    Args:
        d_model: width of the tokens.
        channels: number of channels of the images.
        height: height of a patch in pixels.
        width: width of a patch in pixels.
        dtype: dtype of the computation; None promotes the dtypes of the input and the parameters.
        param_dtype: dtype of the parameters.
        precision: precision of the matrix product, as in `jax.lax.dot_general`.
        rngs: random streams; parameters are drawn from `params`, with the distribution of
            `torch.nn.Linear`.

    Shapes:
        images `(b, c, rows * height, columns * width)`, channels first as transformers has them, or
        without b, to `(b, rows * columns, d_model)`.

    Raises:
        ValueError: if a size is not positive; in the call, if an image has other channels, or
            patches do not fill it.

    Example:
        >>> Patches(6, 3, 4, 2, rngs=nnx.Rngs(0))(jnp.ones((5, 3, 8, 8))).shape
        (5, 8, 6)

    References:
        Dosovitskiy et al. 2020 (arXiv:2010.11929).
    """

    def __init__(
        self,
        d_model: int,
        channels: int,
        height: int,
        width: int,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        rngs: nnx.Rngs | None = None,
    ):
        check_positive(channels=channels, height=height, width=width)
        numerics = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "rngs": rngs,
        }
        self.channels, self.height, self.width = channels, height, width
        self.proj = Linear(channels * height * width, d_model, axes=(None, "embed"), **numerics)

    def __call__(self, images: Float[Array, "*b c rows columns"]) -> Float[Array, "*b t d"]:
        # Rows that are left over would be cut off without a word.
        check_image(images.shape, self.channels, self.height, self.width)
        sizes = {"p": self.height, "q": self.width}
        # In the order of a kernel of `torch.nn.Conv2d`, so that its weights load.
        return self.proj(rearrange(images, "... c (i p) (j q) -> ... (i j) (c p q)", **sizes))
