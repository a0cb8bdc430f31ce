"""ViT: the encoder of images, and the classifier."""

import torch
from jaxtyping import Float
from torch import Tensor

from attn_spec.models.vit import ViTConfig
from torch_ref.functional.shapes import Tokens
from torch_ref.models.image_encoder import ImageEncoder
from torch_ref.modules.linear import Linear


class ViT(ImageEncoder[ViTConfig]):
    """ViT: patches and a class token, learned positions, norms before the layers and at the end.

        x = drop([cls_token; patches(images)] + positions)
        x = block_i(x) for each i
        final_norm(x)

    The arguments are those of `Encoder`; a call takes images `(b, c, height, width)` of the
    config's size. `ViTModel` of transformers has the same function.

    Example:
        >>> model = ViT(ViTConfig(6, 2, 3, image_size=(8, 6), patch_size=(4, 3)))
        >>> hidden = model(torch.ones((5, 3, 8, 6)))
        >>> hidden.shape, model.pooled(hidden).shape
        (torch.Size([5, 5, 6]), torch.Size([5, 6]))
    """

    pooler: Linear | None

    def create_head(self) -> None:
        """Set the norm behind the blocks and the layer of `pooled`."""
        super().create_head()
        d, d_pooled = self.config.d_model, self.config.d_pooled
        width = d if d_pooled is None else d_pooled
        # A width of 0 says that there is none.
        self.pooler = Linear(d, width) if width else None

    def pooled(self, hidden: Tokens) -> Float[Tensor, "*b pooled"]:
        """Return `tanh(pooler(x))` of the class token of `x`, a vector for the image."""
        if self.pooler is None:
            raise ValueError(
                "this ViT has no pooler; got d_pooled=0. Take the class token, hidden[..., 0, :],"
                " or average the others"
            )
        return torch.tanh(self.pooler(hidden[..., 0, :]))


class ViTClassifier(ViT):
    """ViT with a linear layer on its class token: the logits of the labels, `(b, labels)`.

    The arguments are those of `Encoder`; `ViTForImageClassification` of transformers has the same
    function.

    Example:
        >>> model = ViTClassifier(ViTConfig(6, 2, 3, image_size=(8, 6), patch_size=(4, 3)))
        >>> model(torch.ones((5, 3, 8, 6))).shape
        torch.Size([5, 2])
    """

    def create_head(self) -> None:
        """Set the norm behind the blocks and the classifier."""
        # The classifier reads the class token itself.
        self.final_norm, self.pooler = self.norm(), None
        self.classifier = Linear(self.config.d_model, len(self.config.labels))

    def predict(self, hidden: Tokens) -> Tensor:
        """Return the logits of the labels."""
        return self.classifier(hidden[..., 0, :])
