"""Images as tokens: the patches of an image, each made a vector by one matrix."""

from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from attn_spec.checks import check_positive
from attn_spec.input_checks import check_image
from torch_ref.modules.linear import Linear
from torch_ref.modules.typed import TypedModule


class Patches(TypedModule):
    """`proj(patch_i)`: the image cut into patches of `height * width` pixels, row by row.

    This product is a convolution with a stride of the kernel size: `proj` holds its weight
    `(d, c, height, width)` as a matrix of `c * height * width` rows.

    Shapes:
        images `(b, c, rows * height, columns * width)`, channels first as transformers has them, or
        without b, to `(b, rows * columns, d_model)`.

    Example:
        >>> import torch
        >>> Patches(6, 3, 4, 2)(torch.ones((5, 3, 8, 8))).shape
        torch.Size([5, 8, 6])
    """

    def __init__(self, d_model: int, channels: int, height: int, width: int):
        super().__init__()
        check_positive(channels=channels, height=height, width=width)
        self.channels, self.height, self.width = channels, height, width
        self.proj = Linear(channels * height * width, d_model)

    def forward(self, images: Float[Tensor, "*b c rows columns"]) -> Float[Tensor, "*b t d"]:
        # Rows that are left over would be cut off without a word.
        check_image(tuple(images.shape), self.channels, self.height, self.width)
        sizes = {"p": self.height, "q": self.width}
        # In the order of a kernel of `torch.nn.Conv2d`, so that its weights load.
        return self.proj(rearrange(images, "... c (i p) (j q) -> ... (i j) (c p q)", **sizes))
