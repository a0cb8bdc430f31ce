"""DINOv2: the encoder of images, and the classifier."""

from typing import Any

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from flax.typing import PrecisionLike
from jaxtyping import Array, Float

from attn_spec.models.dinov2 import DINOv2Config, read, write
from flax_attn.convert.rules import Layout, Rule
from flax_attn.functional.parameter_sums import spread
from flax_attn.functional.resize import resize_bicubic
from flax_attn.functional.shapes import ArrayLike, Tokens
from flax_attn.models.hugging_face.family import Family
from flax_attn.models.hugging_face.images import image_layout
from flax_attn.models.image_encoder import ImageEncoder, Images
from flax_attn.modules.feed_forward import FeedForward, GatedFeedForward
from flax_attn.modules.initialisation import filled
from flax_attn.modules.layer_scale import LayerScale
from flax_attn.modules.linear import Linear
from flax_attn.sharding.parameters import named

# Each model has GELU or SwiGLU; the rules of the other match nothing.
_LINEARS = {"ff.layers.0": "mlp.fc1", "ff.layers.2": "mlp.fc2", "ff.W_down": "mlp.weights_out"}
_NORMS = {"norm1": "norm1", "norm2": "norm2"}


def _layout(base: str, ignored: str = "") -> Layout:
    block = "trf_blocks.{i}."
    layer = f"{base}encoder.layer.{{i}}."
    # One matrix of both, the gate first.
    kernels = f"{block}ff.W_gate.kernel", f"{block}ff.W_up.kernel"
    biases = f"{block}ff.W_gate.bias", f"{block}ff.W_up.bias"
    rules = (
        Rule(kernels, f"{layer}mlp.weights_in.weight", "i o -> o i"),
        Rule(biases, f"{layer}mlp.weights_in.bias"),
        Rule((f"{block}post_norm1.scale",), f"{layer}layer_scale1.lambda1"),
        Rule((f"{block}post_norm2.scale",), f"{layer}layer_scale2.lambda1"),
        Rule(("mask_token",), f"{base}embeddings.mask_token", "d -> 1 d"),
    )
    return image_layout(base, _LINEARS, _NORMS, *rules, ignored=ignored)


class DINOv2(ImageEncoder[DINOv2Config]):
    """DINOv2: a ViT with layer scale and positions for images of any size.

        x = drop([cls_token; patches(images)] + positions)
        x = x + s_1 * att(norm1(x)), x = x + s_2 * ff(norm2(x)) in each block;  final_norm(x)

    The arguments are those of `Encoder`, and a call takes `masked` beside: which patches, row by
    row, the mask token stands for, booleans `(patches,)` or `(b, patches)`. For images of another
    size than the config's the table of positions is interpolated, see `resize_bicubic`.
    `Dinov2Model` of transformers has the same function.

    Raises:
        ValueError: where its layers do, if the patches do not fill the images, or if patches are
            masked and there is no mask token.

    Example:
        >>> config = DINOv2Config(6, 2, 3, image_size=(8, 8), patch_size=(4, 4))
        >>> model = DINOv2(config, rngs=nnx.Rngs(0))
        >>> model(jnp.ones((5, 3, 8, 12))).shape
        (5, 7, 6)

    References:
        Oquab et al. 2023 (arXiv:2304.07193).
    """

    family = Family(
        {"dinov2": read},
        lambda config: write("Dinov2Model", config),
        _layout("", r"(.*\.)?classifier\..*"),
        base="",
        anchor="pos_emb.embedding",
        architecture="Dinov2Model",
    )
    mask_token: nnx.Param | None

    def create_embeddings(self, **numerics: Any) -> None:
        """Set the patches, the class token, the table of positions and the mask token."""
        super().create_embeddings(**numerics)
        config = self.config
        token = filled(config.d_model, 0, numerics["param_dtype"])
        # Only a model that is trained on masked patches has one.
        self.mask_token = nnx.Param(token, **named(None)) if config.mask_token else None

    def feed_forward(self, **options: Any) -> FeedForward | GatedFeedForward:
        """Return the feed-forward part of a layer: SwiGLU with biases if the config asks for it."""
        config = self.config
        # The largest model alone.
        if config.swiglu:
            return GatedFeedForward(config.d_model, config.d_inner, bias=True, **options)
        return FeedForward(config.d_model, config.d_inner, config.activation, **options)

    def behind(self, *, precision: PrecisionLike = None, **numerics: Any) -> dict[str, Any]:
        """Return the learned factors that a block multiplies the outputs of its layers by."""
        config = self.config
        return {
            f"post_norm{i}": LayerScale(config.d_model, config.layer_scale, **numerics)
            for i in (1, 2)
        }

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
        hidden = jnp.broadcast_to(jnp.asarray(masked)[..., None], x.shape)
        token = spread(self.mask_token[...], x.shape).astype(x.dtype)
        return jnp.where(hidden, token, x)

    def positions(self, height: int, width: int) -> Float[Array, "t d"]:
        """Return the vectors of the positions for this image size, the class token first."""
        config = self.config
        table = self.pos_emb.embedding[...]
        # The size it was trained at: nothing is resized, and nothing rounded.
        if (height, width) == config.image_size:
            return table
        rows, columns = config.patch_size
        # The class token has no place in the image, and keeps its position.
        grid = rearrange(table[1:], "(i j) d -> i j d", i=config.grid[0])
        grid = resize_bicubic(grid, height // rows, width // columns)
        resized = rearrange(grid, "i j d -> (i j) d")
        return jnp.concatenate([table[:1], resized])


class DINOv2Classifier(DINOv2):
    """DINOv2 with a classifier: the logits of the labels.

    A linear layer reads the class token and the mean of the patches. The arguments are those of
    `Encoder` and the errors those of `DINOv2`; `Dinov2ForImageClassification` of transformers has
    the same function.

    Example:
        >>> config = DINOv2Config(6, 2, 3, image_size=(8, 8), patch_size=(4, 4))
        >>> model = DINOv2Classifier(config, rngs=nnx.Rngs(0))
        >>> model(jnp.ones((5, 3, 8, 8))).shape
        (5, 2)

    References:
        Oquab et al. 2023 (arXiv:2304.07193).
    """

    family = Family(
        {"dinov2": read},
        lambda config: write("Dinov2ForImageClassification", config),
        _layout("dinov2."),
        base="dinov2.",
        anchor="pos_emb.embedding",
        architecture="Dinov2ForImageClassification",
    )

    def create_head(self, **numerics: Any) -> None:
        """Set the norm behind the blocks and the classifier."""
        super().create_head(**numerics)
        # It reads the class token and the mean of the patches, side by side.
        self.classifier = Linear(
            2 * self.config.d_model, len(self.config.labels), axes=("embed", None), **numerics
        )

    def predict(self, hidden: Tokens) -> Array:
        """Return the logits of the labels."""
        first = hidden[..., 0, :]
        mean = hidden[..., 1:, :].mean(axis=-2)
        return self.classifier(jnp.concatenate([first, mean], axis=-1))
