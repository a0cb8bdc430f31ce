"""Encoders of images: patches and a class token, learned positions, norms before the layers."""

from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Float

from attn_spec.input_checks import check_image_size
from attn_spec.models.image_encoder import ImageConfig
from flax_attn.functional.dropout import fold_in
from flax_attn.functional.parameter_sums import add, spread
from flax_attn.functional.shapes import Tokens
from flax_attn.models.encoder import Encoder
from flax_attn.modules.block import TransformerBlock
from flax_attn.modules.dropout import Dropout
from flax_attn.modules.embedding import Embedding
from flax_attn.modules.feed_forward import FeedForward, GatedFeedForward
from flax_attn.modules.initialisation import next_key, normal
from flax_attn.modules.multi_head import MultiHeadAttention
from flax_attn.modules.norm import LayerNorm
from flax_attn.modules.patches import Patches
from flax_attn.sharding.parameters import named

C = TypeVar("C", bound=ImageConfig)
# Channels first, as in PyTorch.
Images = Float[Array, "*b c height width"]


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

    def create_embeddings(self, **numerics: Any) -> None:
        """Set the patches, the class token and the table of positions."""
        config = self.config
        self.patches = Patches(config.d_model, config.channels, *config.patch_size, **numerics)
        self.cls_token = _class_token(config.d_model, **numerics)
        rows, columns = config.grid
        tables = {"axes": (None, "embed"), **numerics}
        # The class token has a position as well, the first.
        self.pos_emb = Embedding(1 + rows * columns, config.d_model, **tables)
        self.drop_emb = Dropout(config.dropout, rngs=numerics["rngs"])

    def create_head(self, **numerics: Any) -> None:
        """Set the norm behind the blocks."""
        self.final_norm = self.norm(**numerics)

    def block(self, layer: int, backend: str, **numerics: Any) -> TransformerBlock:
        """Return a block: norms before attention and feed-forward."""
        attention = self.attention(backend=backend, **numerics)
        norms = self.norm(**numerics), self.norm(**numerics)
        return TransformerBlock(
            attention, self.feed_forward(**numerics), *norms, **self.behind(**numerics)
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

    def norm(self, *, precision: PrecisionLike = None, **numerics: Any) -> LayerNorm:
        """Return a norm."""
        return LayerNorm(self.config.d_model, self.config.eps, **numerics)

    def behind(self, *, rngs: nnx.Rngs, **numerics: Any) -> dict[str, Any]:
        """Return the dropout after the layers of a block, as arguments of `TransformerBlock`."""
        return {"drop_shortcut": Dropout(self.config.dropout, rngs=rngs)}

    def positions(self, height: int, width: int) -> Float[Array, "t d"]:
        """Return the vectors of the positions for this image size, the class token first."""
        check_image_size((height, width), self.config.image_size)
        return self.pos_emb.embedding[...]

    def tokens(self, images: Images) -> Tokens:
        """Return the vectors of the patches, before the class token and the positions."""
        return self.patches(images)

    def hidden(self, images: Images, *, dropout_key: Array | None = None, **inputs: Any) -> Tokens:
        """Return the vectors of the class token and all patches; takes the arguments of a call."""
        x = self.tokens(images, **inputs)
        *rows, _, d = x.shape
        # The table of positions begins with that of the class token.
        first = spread(self.cls_token[...], (*rows, 1, d))
        x = jnp.concatenate([first.astype(x.dtype), x], axis=-2)
        height, width = images.shape[-2:]
        positions = self.positions(height, width)
        x = add(x, positions.astype(x.dtype))
        # 0 is the key of the embedding.
        x = self.drop_emb(x, dropout_key=fold_in(dropout_key, 0))
        return self.run(x, dropout_key=dropout_key)

    def __call__(self, images: Images, *, dropout_key: Array | None = None, **inputs: Any) -> Array:
        """Return the vectors of the class token and of all patches, or what the head makes of them.

        Args:
            images: images `(b, c, height, width)` or `(c, height, width)`.
            dropout_key: key of the dropout in train mode; None draws keys from the `dropout`
                streams.
            inputs: further inputs of the family's `tokens`.

        Raises:
            ValueError: if the images have other channels or another size.
        """
        return self.predict(self.hidden(images, dropout_key=dropout_key, **inputs))


def _class_token(d: int, *, rngs: nnx.Rngs, param_dtype: Dtype, **numerics: Any) -> nnx.Param:
    draw = normal(0.02)
    values = draw(next_key(rngs.params), (d,), param_dtype)
    return nnx.Param(values, **named(None))
