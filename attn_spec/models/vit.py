"""ViT: the encoder of images, and the classifier."""

from dataclasses import dataclass
from typing import Any

from attn_spec.hugging_face.bounds import PATCHES
from attn_spec.hugging_face.fields import Fields
from attn_spec.models.image_encoder import ImageConfig, read_images, write_images


@dataclass(frozen=True)
class ViTConfig(ImageConfig):
    """The sizes of a ViT: those of an `ImageConfig`, and its pooler.

    Args:
        d_pooled: width of what `pooled` returns; None is d_model, and 0 is a model without a
            pooler.

    Example:
        >>> ViTConfig(768, 12, 12).grid
        (14, 14)
    """

    d_pooled: int | None = None


def read(fields: Fields, dropout: float | None) -> ViTConfig:
    """Return the config that the fields of a `config.json` describe."""
    # The pooler's tanh is fixed here.
    fields.only(pooler_act="tanh")
    d_model, pooled = fields.integer("hidden_size"), fields.optional_integer("pooler_output_size")
    return ViTConfig(
        **read_images(fields, dropout),
        d_hidden=fields.integer("intermediate_size"),
        patch_size=fields.pair("patch_size", 16, PATCHES),
        eps=fields.epsilon("layer_norm_eps", 1e-12),
        d_pooled=None if pooled in (None, d_model) else pooled,
    )


def write(architecture: str, config: ViTConfig) -> dict[str, Any]:
    """Return the fields of `config.json` that describe a config."""
    # transformers has no null here: the width is written out.
    hidden = {"intermediate_size": config.d_hidden or 4 * config.d_model}
    pooler = {"pooler_output_size": config.d_pooled or config.d_model, "pooler_act": "tanh"}
    return {**write_images(config, "vit", architecture), **hidden, **pooler}
