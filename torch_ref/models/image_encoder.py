"""Encoders of images: patches and a class token, learned positions, norms before the layers."""

from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attn_spec.input_checks import check_image_size
from attn_spec.models.image_encoder import ImageConfig
from torch_ref.functional.dropout import fold_in
from torch_ref.functional.shapes import Tokens
from torch_ref.models.encoder import Encoder
from torch_ref.modules.block import TransformerBlock
from torch_ref.modules.dropout import Dropout
from torch_ref.modules.embedding import Embedding
from torch_ref.modules.feed_forward import FeedForward, GatedFeedForward
from torch_ref.modules.multi_head import MultiHeadAttention
from torch_ref.modules.norm import LayerNorm
from torch_ref.modules.patches import Patches

C = TypeVar("C", bound=ImageConfig)
# Channels first, as in PyTorch.
Images = Float[Tensor, "*b c height width"]


class ImageEncoder(Encoder[C]):
    """An encoder of images; a base class, see `ViT` and `DINOv2`.

        x = drop([cls_token; patches(images)] + positions)
        x = block_i(x) for each i
        final_norm(x)

    A family overrides the parts that differ.

    Shapes:
        images `(b, c, height, width)` or without b, channels first, to `(b, 1 + patches, d_model)`
        or without b; the class token is the first.
    """

    def create_embeddings(self) -> None:
        """Set the patches, the class token and the table of positions."""
        config = self.config
        self.patches = Patches(config.d_model, config.channels, *config.patch_size)
        self.cls_token = nn.Parameter(0.02 * torch.randn(config.d_model))
        rows, columns = config.grid
        # The class token has a position as well, the first.
        self.pos_emb = Embedding(1 + rows * columns, config.d_model)
        self.drop_emb = Dropout(config.dropout)

    def create_head(self) -> None:
        """Set the norm behind the blocks."""
        self.final_norm = self.norm()

    def block(self, layer: int, backend: str) -> TransformerBlock:
        """Return a block: norms before attention and feed-forward."""
        attention = self.attention(backend=backend)
        return TransformerBlock(
            attention, self.feed_forward(), self.norm(), self.norm(), **self.behind()
        )

    def attention(self, **options: Any) -> MultiHeadAttention:
        """Return the attention of a layer; `options` are arguments of `MultiHeadAttention`."""
        config = self.config
        d = config.d_model
        biases = {"qkv_bias": config.qkv_bias, "causal": False}
        return MultiHeadAttention(
            d, d, None, config.attention_dropout, config.num_heads, **biases, **options
        )

    def feed_forward(self, **options: Any) -> FeedForward | GatedFeedForward:
        """Return the feed-forward part of a layer."""
        return FeedForward(
            self.config.d_model, self.config.d_hidden, self.config.activation, **options
        )

    def norm(self) -> LayerNorm:
        """Return a norm."""
        return LayerNorm(self.config.d_model, self.config.eps)

    def behind(self) -> dict[str, Any]:
        """Return the dropout after the layers of a block, as arguments of `TransformerBlock`."""
        return {"drop_shortcut": Dropout(self.config.dropout)}

    def positions(self, height: int, width: int) -> Float[Tensor, "t d"]:
        """Return the vectors of the positions for this image size, the class token first."""
        check_image_size((height, width), self.config.image_size)
        return self.pos_emb.weight

    def tokens(self, images: Images) -> Tokens:
        """Return the vectors of the patches, before the class token and the positions."""
        return self.patches(images)

    def hidden(self, images: Images, *, dropout_key: Tensor | None = None, **inputs: Any) -> Tokens:
        """Return the vectors of the class token and all patches; takes the arguments of a call."""
        x = self.tokens(images, **inputs)
        # The table of positions begins with that of the class token.
        first = self.cls_token.expand(*x.shape[:-2], 1, -1)
        x = torch.cat([first, x], dim=-2)
        height, width = images.shape[-2:]
        x = x + self.positions(height, width)
        # 0 is the key of the embedding.
        x = self.drop_emb(x, dropout_key=fold_in(dropout_key, 0))
        return self.run(x, dropout_key=dropout_key)

    def forward(
        self, images: Images, *, dropout_key: Tensor | None = None, **inputs: Any
    ) -> Tensor:
        """Return the vectors of the class token and of all patches, or what the head makes of them.

        Args:
            images: images `(b, c, height, width)` or `(c, height, width)`.
            dropout_key: key of the dropout in train mode; None draws keys from torch's generator.
            inputs: further inputs of the family's `tokens`.

        Raises:
            ValueError: if the images have other channels or another size.
        """
        return self.predict(self.hidden(images, dropout_key=dropout_key, **inputs))
