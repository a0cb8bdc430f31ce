"""Encoders of images: patches and a class token, learned positions, norms before the layers."""

import reprlib
from dataclasses import dataclass
from typing import Any

from attn_spec.hugging_face.bounds import IMAGES
from attn_spec.hugging_face.fields import ACTIVATIONS, THEIR_ACTIVATIONS, Fields


@dataclass(frozen=True)
class ImageConfig:
    """The sizes of an encoder of images; a base class, a family adds what only its models have.

    Args:
        d_model: width of the tokens.
        num_heads: number of heads.
        num_layers: number of blocks.
        d_hidden: width inside the feed-forward layer; None is `4 * d_model`.
        image_size: height and width of the images that the positions are for, in pixels.
        patch_size: height and width of a patch, in pixels.
        channels: number of channels of the images.
        qkv_bias: whether the projections of queries, keys and values have a bias.
        activation: activation of the feed-forward layer.
        eps: epsilon of the norms.
        dropout: the probability that an element of an embedding is dropped in train mode, or of
            what a layer adds.
        attention_dropout: the probability that an attention weight is dropped in train mode.
        labels: names of the classes of a classifier.

    Raises:
        ValueError: if the patches do not fill an image.

    Example:
        >>> ImageConfig(768, 12, 12, image_size=(224, 224), patch_size=(16, 16)).grid
        (14, 14)
    """

    d_model: int
    num_heads: int
    num_layers: int
    d_hidden: int | None = None
    image_size: tuple[int, int] = (224, 224)
    patch_size: tuple[int, int] = (16, 16)
    channels: int = 3
    qkv_bias: bool = True
    activation: str = "gelu_exact"
    eps: float = 1e-12
    dropout: float = 0.0
    attention_dropout: float = 0.0
    labels: tuple[str, ...] = ("LABEL_0", "LABEL_1")

    def __post_init__(self):
        if self.image_size[0] % self.patch_size[0] or self.image_size[1] % self.patch_size[1]:
            raise ValueError(
                f"patches must fill an image; got image_size={self.image_size},"
                f" patch_size={self.patch_size}. Take an image_size that patch_size divides"
            )

    @property
    def grid(self) -> tuple[int, int]:
        """How many patches an image has along its height and its width."""
        return self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1]


def read_images(fields: Fields, dropout: float | None) -> dict[str, Any]:
    """Return the arguments of an `ImageConfig`, all but the width of the feed-forward layer.

    Raises:
        ValueError: if a field is missing or of another kind.
    """
    return {
        "d_model": fields.integer("hidden_size"),
        "num_heads": fields.heads("num_attention_heads"),
        "num_layers": fields.count("num_hidden_layers"),
        "image_size": fields.pair("image_size", 224, IMAGES),
        "channels": fields.heads("num_channels", 3),
        "qkv_bias": fields.flag("qkv_bias", True),
        "activation": fields.choose("hidden_act", ACTIVATIONS, "gelu"),
        "dropout": fields.rate("hidden_dropout_prob", 0.0) if dropout is None else dropout,
        "attention_dropout": (
            fields.rate("attention_probs_dropout_prob", 0.0) if dropout is None else dropout
        ),
        "labels": _labels(fields),
    }


def _labels(fields: Fields) -> tuple[str, ...]:
    # A file without names has as many classes as `num_labels` says, called as transformers does.
    names = fields.optional_object("id2label")
    if names is None:
        return tuple(f"LABEL_{i}" for i in range(fields.count("num_labels", 2)))
    # JSON has texts for keys, in any order.
    wanted = [str(i) for i in range(len(names))]
    if names.keys() != set(wanted):
        raise ValueError(
            f"{fields.where}: id2label must name the labels 0 to {len(names) - 1}, one each; got "
            f"{reprlib.repr(list(names))}. Take the config.json that came with the weights"
        )
    return tuple(str(names[key]) for key in wanted)


def write_images(config: ImageConfig, model_type: str, architecture: str) -> dict[str, Any]:
    """Return the fields of `config.json`, all but the width of the feed-forward layer."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "image_size": _size(config.image_size),
        "patch_size": _size(config.patch_size),
        "num_channels": config.channels,
        "qkv_bias": config.qkv_bias,
        "hidden_act": THEIR_ACTIVATIONS[config.activation],
        "layer_norm_eps": config.eps,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "id2label": {str(i): name for i, name in enumerate(config.labels)},
        "label2id": {name: i for i, name in enumerate(config.labels)},
    }


def _size(pair: tuple[int, int]) -> int | list[int]:
    # transformers writes one number for a square.
    return pair[0] if pair[0] == pair[1] else list(pair)
