"""ViT: the encoder of images, and the classifier."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from flax_attn.convert.rules import Layout
from flax_attn.functional.shapes import Tokens
from flax_attn.models.hugging_face.bounds import PATCHES
from flax_attn.models.hugging_face.family import Family, linears
from flax_attn.models.hugging_face.fields import Fields
from flax_attn.models.hugging_face.images import image_layout, read_images, write_images
from flax_attn.models.image_encoder import ImageConfig, ImageEncoder
from flax_attn.modules.linear import Linear


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


def _read(fields: Fields, dropout: float | None) -> ViTConfig:
    fields.only(pooler_act="tanh")
    d_model, pooled = fields.integer("hidden_size"), fields.optional_integer("pooler_output_size")
    return ViTConfig(
        **read_images(fields, dropout),
        d_hidden=fields.integer("intermediate_size"),
        patch_size=fields.pair("patch_size", 16, PATCHES),
        eps=fields.epsilon("layer_norm_eps", 1e-12),
        d_pooled=None if pooled in (None, d_model) else pooled,
    )


def _fit(config: ViTConfig, names: Collection[str]) -> ViTConfig:
    """Return the config with a pooler only if the files have one: `config.json` does not say."""
    return (
        config
        if any(name.endswith("pooler.dense.weight") for name in names)
        else replace(config, d_pooled=0)
    )


def _write(architecture: str, config: ViTConfig) -> dict[str, Any]:
    hidden = {"intermediate_size": config.d_hidden or 4 * config.d_model}
    pooler = {"pooler_output_size": config.d_pooled or config.d_model, "pooler_act": "tanh"}
    return {**write_images(config, "vit", architecture), **hidden, **pooler}


def _layout(base: str, ignored: str = "") -> Layout:
    linear = {"ff.layers.0": "intermediate.dense", "ff.layers.2": "output.dense"}
    norm = {"norm1": "layernorm_before", "norm2": "layernorm_after"}
    return image_layout(
        base, linear, norm, *linears({"pooler": f"{base}pooler.dense"}), ignored=ignored
    )


class ViT(ImageEncoder[ViTConfig]):
    """ViT: patches and a class token, learned positions, norms before the layers and at the end.

        x = drop([cls_token; patches(images)] + positions)
        x = block_i(x) for each i
        final_norm(x)

    The arguments are those of `Encoder`; a call takes images `(b, c, height, width)` of the
    config's size. `ViTModel` of transformers has the same function.

    Raises:
        ValueError: where its layers do, or if images have another size.

    Example:
        >>> from flax import nnx
        >>> model = ViT(ViTConfig(6, 2, 3, image_size=(8, 6), patch_size=(4, 3)), rngs=nnx.Rngs(0))
        >>> hidden = model(jnp.ones((5, 3, 8, 6)))
        >>> hidden.shape, model.pooled(hidden).shape
        ((5, 5, 6), (5, 6))

    References:
        Dosovitskiy et al. 2020 (arXiv:2010.11929).
    """

    family = Family(
        {"vit": _read},
        lambda config: _write("ViTModel", config),
        _layout("", r"(.*\.)?classifier\..*"),
        base="",
        anchor="pos_emb.embedding",
        architecture="ViTModel",
        fit=_fit,
    )
    pooler: Linear | None

    def create_head(self, **numerics: Any) -> None:
        """Set the norm behind the blocks and the layer of `pooled`."""
        super().create_head(**numerics)
        d, d_pooled = self.config.d_model, self.config.d_pooled
        width = d if d_pooled is None else d_pooled
        self.pooler = Linear(d, width, axes=("embed", None), **numerics) if width else None

    def pooled(self, hidden: Tokens) -> Float[Array, "*b pooled"]:
        """Return `tanh(pooler(x))` of the class token of `x`, a vector for the image.

        Raises:
            ValueError: if the model has no pooler.
        """
        if self.pooler is None:
            raise ValueError(
                "this ViT has no pooler; got d_pooled=0. Take the class token, hidden[..., 0, :],"
                " or average the others"
            )
        return jnp.tanh(self.pooler(hidden[..., 0, :]))


class ViTClassifier(ViT):
    """ViT with a linear layer on its class token: the logits of the labels, `(b, labels)`.

    The arguments are those of `Encoder`; `ViTForImageClassification` of transformers has the same
    function.

    Raises:
        ValueError: where its layers do, or if images have another size.

    Example:
        >>> from flax import nnx
        >>> config = ViTConfig(6, 2, 3, image_size=(8, 6), patch_size=(4, 3))
        >>> model = ViTClassifier(config, rngs=nnx.Rngs(0))
        >>> model(jnp.ones((5, 3, 8, 6))).shape
        (5, 2)

    References:
        Dosovitskiy et al. 2020 (arXiv:2010.11929).
    """

    family = Family(
        {"vit": _read},
        lambda config: _write("ViTForImageClassification", config),
        _layout("vit.", r"vit\.pooler\..*"),
        base="vit.",
        anchor="pos_emb.embedding",
        architecture="ViTForImageClassification",
    )

    def create_head(self, **numerics: Any) -> None:
        """Set the norm behind the blocks and the classifier."""
        self.final_norm, self.pooler = self.norm(**numerics), None
        self.classifier = Linear(
            self.config.d_model, len(self.config.labels), axes=("embed", None), **numerics
        )

    def predict(self, hidden: Tokens) -> Array:
        """Return the logits of the labels."""
        return self.classifier(hidden[..., 0, :])
