"""DINOv2: the encoder of images, and the classifier."""

from dataclasses import dataclass
from typing import Any

from attn_spec.hugging_face.bounds import PATCHES
from attn_spec.hugging_face.fields import Fields
from attn_spec.models.image_encoder import ImageConfig, read_images, write_images


@dataclass(frozen=True)
class DINOv2Config(ImageConfig):
    """The sizes of a DINOv2: those of an `ImageConfig`, square images, and its own parts.

    Args:
        swiglu: whether the feed-forward layer is a SwiGLU: then its width is two thirds of
            d_hidden, rounded up to a multiple of 8.
        layer_scale: value of the factors on what the layers add, in a new model.
        mask_token: whether there is a token for patches that are hidden.

    Raises:
        ValueError: if the images are not square, or patches do not fill them.

    Example:
        >>> DINOv2Config(768, 12, 12).grid
        (37, 37)
    """

    image_size: tuple[int, int] = (518, 518)
    patch_size: tuple[int, int] = (14, 14)
    eps: float = 1e-6
    swiglu: bool = False
    layer_scale: float = 1.0
    mask_token: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.grid[0] != self.grid[1]:
            raise ValueError(
                "the positions of a DINOv2 are those of a square grid; got"
                f" image_size={self.image_size}, patch_size={self.patch_size}. Images of another"
                " shape are given to the call"
            )

    @property
    def d_inner(self) -> int:
        """Width inside the feed-forward layer."""
        # With SwiGLU two thirds of the width, rounded up to a multiple of 8, as in DINOv2's own
        # code.
        d_hidden = 4 * self.d_model if self.d_hidden is None else self.d_hidden
        return (d_hidden * 2 // 3 + 7) // 8 * 8 if self.swiglu else d_hidden


def read(fields: Fields, dropout: float | None) -> DINOv2Config:
    """Return the config that the fields of a `config.json` describe."""
    # Whole blocks are dropped in training alone, at a rate that is 0 in published files.
    fields.only(drop_path_rate=0.0)
    return DINOv2Config(
        **read_images(fields, dropout),
        d_hidden=fields.integer("hidden_size") * fields.count("mlp_ratio", 4),
        patch_size=fields.pair("patch_size", 14, PATCHES),
        eps=fields.epsilon("layer_norm_eps", 1e-6),
        swiglu=fields.flag("use_swiglu_ffn", False),
        layer_scale=fields.factor("layerscale_value", 1.0),
        mask_token=fields.flag("use_mask_token", True),
    )


def write(architecture: str, config: DINOv2Config) -> dict[str, Any]:
    """Return the fields of `config.json` that describe a config."""
    d_hidden = 4 * config.d_model if config.d_hidden is None else config.d_hidden
    # transformers stores the ratio of the two widths, an integer.
    if d_hidden % config.d_model:
        raise ValueError(
            "transformers' DINOv2 has a d_hidden that is a multiple of d_model; got "
            f"d_hidden={d_hidden}, d_model={config.d_model}. Save with flax_attn.convert.save"
        )
    own = {
        "mlp_ratio": d_hidden // config.d_model,
        "use_swiglu_ffn": config.swiglu,
        "layerscale_value": config.layer_scale,
        "use_mask_token": config.mask_token,
    }
    return {**write_images(config, "dinov2", architecture), **own}
