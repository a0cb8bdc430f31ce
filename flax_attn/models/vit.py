"""ViT: the encoder of images, and the classifier."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from attn_spec.models.vit import ViTConfig, read, write
from flax_attn.convert.rules import Layout
from flax_attn.functional.shapes import Tokens
from flax_attn.models.hugging_face.family import Family, linears
from flax_attn.models.hugging_face.images import image_layout
from flax_attn.models.image_encoder import ImageEncoder
from flax_attn.modules.linear import Linear


def _fit(config: ViTConfig, names: Collection[str]) -> ViTConfig:
    """Return the config with a pooler only if the files have one: `config.json` does not say."""
    if any(name.endswith("pooler.dense.weight") for name in names):
        return config
    return replace(config, d_pooled=0)


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
        {"vit": read},
        lambda config: write("ViTModel", config),
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
        # A width of 0 says that there is none.
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
        {"vit": read},
        lambda config: write("ViTForImageClassification", config),
        _layout("vit.", r"vit\.pooler\..*"),
        base="vit.",
        anchor="pos_emb.embedding",
        architecture="ViTForImageClassification",
    )

    def create_head(self, **numerics: Any) -> None:
        """Set the norm behind the blocks and the classifier."""
        # The classifier reads the class token itself.
        self.final_norm, self.pooler = self.norm(**numerics), None
        self.classifier = Linear(
            self.config.d_model, len(self.config.labels), axes=("embed", None), **numerics
        )

    def predict(self, hidden: Tokens) -> Array:
        """Return the logits of the labels."""
        return self.classifier(hidden[..., 0, :])
