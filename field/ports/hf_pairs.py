"""Models of transformers 4.57 that combine an encoder and a decoder, or two encoders."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from field.port import CHECKS, Built, Port
from field.ports._hf import IMAGE, TEXT, pair
from field.ports.hf_senses import CLIP_IMAGE, WAVES

DECODER = TEXT | {
    "max_position_embeddings": 128,
    "is_decoder": True,
    "add_cross_attention": True,
    "use_cache": False,
}
BERT, WRITER, VIT = ("Bert", TEXT), ("Bert", DECODER), ("ViT", IMAGE)
NARROW = ("Bert", TEXT | {"hidden_size": 18})
CLIP = ("CLIPVision", CLIP_IMAGE)
SOUND = ("Wav2Vec2", WAVES | {"feat_extract_norm": "layer", "do_stable_layer_norm": True})

# name, class, what encodes, what decodes, call, words
ROWS = (
    ("encoder_decoder/bert", "EncoderDecoderModel", BERT, WRITER, "seq2seq", "BERT to BERT"),
    (
        "encoder_decoder/narrow",
        "EncoderDecoderModel",
        NARROW,
        WRITER,
        "seq2seq",
        "BERT to a wider BERT, projected",
    ),
    (
        "vision_encoder_decoder/vit",
        "VisionEncoderDecoderModel",
        VIT,
        WRITER,
        "image to text",
        "ViT to BERT",
    ),
    (
        "speech_encoder_decoder/bert",
        "SpeechEncoderDecoderModel",
        SOUND,
        WRITER,
        "waves to text",
        "wav2vec 2.0 to BERT",
    ),
    (
        "vision_text_dual_encoder/vit",
        "VisionTextDualEncoderModel",
        VIT,
        BERT,
        "text and image",
        "ViT beside BERT",
    ),
    (
        "vision_text_dual_encoder/clip",
        "VisionTextDualEncoderModel",
        CLIP,
        BERT,
        "text and image",
        "CLIP beside BERT",
    ),
)


def ports() -> list[Port]:
    """Return the rows."""
    return [
        Port(
            f"transformers/{name}",
            "transformers",
            words,
            partial(_build, *row),
            f"`transformers.{row[0]}`",
            CHECKS,
        )
        for name, *row, words in ROWS
    ]


def _build(
    kind: str,
    first: tuple[str, Mapping[str, Any]],
    second: tuple[str, Mapping[str, Any]],
    call: str,
    dtype: str,
) -> Built:
    import jax.numpy as jnp
    import transformers

    parts = [
        getattr(transformers, f"{name}Config")(**settings) for name, settings in (first, second)
    ]
    config_class = getattr(transformers, kind.replace("Model", "Config"))
    if kind.startswith("VisionText"):
        config = config_class.from_vision_text_configs(*parts, projection_dim=10)
    else:
        config = config_class.from_encoder_decoder_configs(*parts)
        config.decoder_start_token_id, config.pad_token_id = 2, 0
    # This class cannot be built without parameters.
    flax = getattr(transformers, f"Flax{kind}")(config, dtype=getattr(jnp, dtype))
    return pair(flax, getattr(transformers, kind)(config).eval(), call)
