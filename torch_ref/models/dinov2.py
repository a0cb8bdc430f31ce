"""DINOv2: the encoder of images, and the classifier."""

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from attn_spec.models.dinov2 import DINOv2Config
from torch_ref.functional.resize import resize_bicubic
from torch_ref.functional.shapes import ArrayLike, Tokens
from torch_ref.models.image_encoder import ImageEncoder, Images
from torch_ref.modules.feed_forward import FeedForward, GatedFeedForward
from torch_ref.modules.layer_scale import LayerScale
from torch_ref.modules.linear import Linear


class DINOv2(ImageEncoder[DINOv2Config]):
    """DINOv2: a ViT with layer scale and positions for images of any size.

        x = drop([cls_token; patches(images)] + positions)
        x = x + s_1 * att(norm1(x)), x = x + s_2 * ff(norm2(x)) in each block;  final_norm(x)

    The arguments are those of `Encoder`, and a call takes `masked` beside: which patches, row by
    row, the mask token stands for, booleans `(patches,)` or `(b, patches)`. For images of another
    size than the config's the table of positions is interpolated, see `resize_bicubic`.
    `Dinov2Model` of transformers has the same function.

    Example:
        >>> model = DINOv2(DINOv2Config(6, 2, 3, image_size=(8, 8), patch_size=(4, 4)))
        >>> model(torch.ones((5, 3, 8, 12))).shape
        torch.Size([5, 7, 6])
    """

    mask_token: nn.Parameter | None

    def create_embeddings(self) -> None:
        """Set the patches, the class token, the table of positions and the mask token."""
        super().create_embeddings()
        config = self.config
        token = torch.zeros(config.d_model)
        # Only a model that is trained on masked patches has one.
        self.mask_token = nn.Parameter(token) if config.mask_token else None

    def feed_forward(self, **options: Any) -> FeedForward | GatedFeedForward:
        """Return the feed-forward part of a layer: SwiGLU with biases if the config asks for it."""
        config = self.config
        # The largest model alone.
        if config.swiglu:
            return GatedFeedForward(config.d_model, config.d_inner, bias=True, **options)
        return FeedForward(config.d_model, config.d_inner, config.activation, **options)

    def behind(self) -> dict[str, Any]:
        """Return the learned factors that a block multiplies the outputs of its layers by."""
        config = self.config
        return {f"post_norm{i}": LayerScale(config.d_model, config.layer_scale) for i in (1, 2)}

    def tokens(self, images: Images, masked: ArrayLike | None = None) -> Tokens:
        """Return the vectors of the patches, the mask token where they are masked."""
        x = self.patches(images)
        if masked is None:
            return x
        if self.mask_token is None:
            raise ValueError(
                "masked patches need a mask token; got mask_token=False. Construct the model"
                " with one"
            )
        hidden = torch.as_tensor(masked, device=x.device)[..., None]
        return torch.where(hidden, self.mask_token, x)

    def positions(self, height: int, width: int) -> Float[Tensor, "t d"]:
        """Return the vectors of the positions for this image size, the class token first."""
        config = self.config
        table = self.pos_emb.weight
        # The size it was trained at: nothing is resized, and nothing rounded.
        if (height, width) == config.image_size:
            return table
        rows, columns = config.patch_size
        # The class token has no place in the image, and keeps its position.
        grid = rearrange(table[1:], "(i j) d -> i j d", i=config.grid[0])
        grid = resize_bicubic(grid, height // rows, width // columns)
        resized = rearrange(grid, "i j d -> (i j) d")
        return torch.cat([table[:1], resized])


class DINOv2Classifier(DINOv2):
    """DINOv2 with a classifier: the logits of the labels.

    A linear layer reads the class token and the mean of the patches. The arguments are those of
    `Encoder`; `Dinov2ForImageClassification` of transformers has the same function.

    Example:
        >>> model = DINOv2Classifier(DINOv2Config(6, 2, 3, image_size=(8, 8), patch_size=(4, 4)))
        >>> model(torch.ones((5, 3, 8, 8))).shape
        torch.Size([5, 2])
    """

    def create_head(self) -> None:
        """Set the norm behind the blocks and the classifier."""
        super().create_head()
        # It reads the class token and the mean of the patches, side by side.
        self.classifier = Linear(2 * self.config.d_model, len(self.config.labels))

    def predict(self, hidden: Tokens) -> Tensor:
        """Return the logits of the labels."""
        first = hidden[..., 0, :]
        mean = hidden[..., 1:, :].mean(dim=-2)
        return self.classifier(torch.cat([first, mean], dim=-1))
