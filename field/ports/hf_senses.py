"""Models of transformers 4.57 that read images or sound."""

from __future__ import annotations

from collections.abc import Iterator

from field.port import Port
from field.ports._hf import IMAGE, SEQ2SEQ, row

DINO = {key: value for key, value in IMAGE.items() if key != "intermediate_size"} | {"mlp_ratio": 2}
CLIP = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "projection_dim": 10,
}
CLIP_TEXT = CLIP | {"vocab_size": 37, "max_position_embeddings": 64}
CLIP_IMAGE = CLIP | {"image_size": 12, "patch_size": 4}
CONVOLUTIONS = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 2]}
WAVES = {
    "vocab_size": 17,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "conv_dim": (8, 12),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 6,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    "codevector_dim": 8,
    "proj_codevector_dim": 8,
    "num_codevectors_per_group": 4,
}
WHISPER = {key: value for key, value in SEQ2SEQ.items() if key != "max_position_embeddings"} | {
    "num_mel_bins": 6,
    "max_source_positions": 10,
    "max_target_positions": 16,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_eos_token_id": None,
}


def ports() -> list[Port]:
    """Return the rows."""
    return [*_transformers(), *_clip(), *_convolutions(), *_sound()]


def _transformers() -> Iterator[Port]:
    def image(name, model, words, base=IMAGE, call="image", **settings):
        return row(name, model, words, base, call, **settings)

    yield image("vit/base", "ViTModel", "exact GELU, pooler")
    yield image(
        "vit/classes",
        "ViTForImageClassification",
        "three classes, one channel, no bias",
        num_labels=3,
        num_channels=1,
        qkv_bias=False,
    )
    yield image("beit/base", "BeitModel", "no positions, mean pooled")
    yield image(
        "beit/absolute",
        "BeitModel",
        "absolute positions, the class token pooled",
        use_absolute_position_embeddings=True,
        use_mean_pooling=False,
    )
    yield image(
        "beit/relative",
        "BeitModel",
        "relative positions in each layer",
        use_relative_position_bias=True,
    )
    yield image(
        "beit/shared",
        "BeitForImageClassification",
        "relative positions shared by the layers, no layer scale",
        use_shared_relative_position_bias=True,
        layer_scale_init_value=0.0,
        num_labels=3,
    )
    yield image("dinov2/base", "Dinov2Model", "layer scale, exact GELU", DINO)
    yield image("dinov2/gated", "Dinov2Model", "SwiGLU", DINO, use_swiglu_ffn=True)
    yield image(
        "dinov2/longer image",
        "Dinov2Model",
        "an image of another size: interpolated positions",
        DINO,
        "image as long as it is",
    )
    yield image(
        "dinov2/classes", "Dinov2ForImageClassification", "three classes", DINO, num_labels=3
    )


def _clip() -> Iterator[Port]:
    yield row(
        "clip/text",
        "CLIPTextModel",
        "causal, sigmoid GELU, pooled at the largest id",
        CLIP_TEXT,
        eos_token_id=2,
    )
    yield row(
        "clip/text, end token",
        "CLIPTextModel",
        "exact GELU, pooled at the first end token",
        CLIP_TEXT,
        eos_token_id=9,
        hidden_act="gelu",
    )
    yield row(
        "clip/projection",
        "CLIPTextModelWithProjection",
        "text, projected",
        CLIP_TEXT,
        eos_token_id=2,
    )
    yield row("clip/images", "CLIPVisionModel", "images", CLIP_IMAGE, "image")
    yield row(
        "clip/both",
        "CLIPModel",
        "text against images",
        {},
        "text and image",
        text_config=CLIP_TEXT,
        vision_config=CLIP_IMAGE,
        projection_dim=10,
    )


def _convolutions() -> Iterator[Port]:
    yield row(
        "resnet/bottleneck",
        "ResNetModel",
        "bottleneck layers, batch norm",
        CONVOLUTIONS,
        "large image",
    )
    yield row(
        "resnet/basic",
        "ResNetForImageClassification",
        "basic layers, three classes",
        CONVOLUTIONS,
        "large image",
        layer_type="basic",
        num_labels=3,
    )
    yield row(
        "regnet/y",
        "RegNetModel",
        "squeeze and excitation",
        CONVOLUTIONS,
        "large image",
        groups_width=4,
    )
    yield row(
        "regnet/x",
        "RegNetForImageClassification",
        "without, three classes",
        CONVOLUTIONS,
        "large image",
        groups_width=4,
        layer_type="x",
        num_labels=3,
    )


def _sound() -> Iterator[Port]:
    yield row(
        "wav2vec2/group norm",
        "Wav2Vec2Model",
        "a group norm in the convolutions, norms after the layers",
        WAVES,
        "waves",
    )
    yield row(
        "wav2vec2/layer norm",
        "Wav2Vec2Model",
        "layer norms in the convolutions, norms before the layers",
        WAVES,
        "waves",
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        conv_bias=True,
    )
    yield row(
        "wav2vec2/odd positions",
        "Wav2Vec2Model",
        "a convolution of odd width for positions",
        WAVES,
        "waves",
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        num_conv_pos_embeddings=5,
    )
    yield row(
        "wav2vec2/letters",
        "Wav2Vec2ForCTC",
        "letters by CTC",
        WAVES,
        "waves",
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
    )
    yield row("whisper/base", "WhisperModel", "exact GELU", WHISPER, "spectrum")
    yield row(
        "whisper/head",
        "WhisperForConditionalGeneration",
        "tied head, embeddings scaled",
        WHISPER,
        "spectrum",
        scale_embedding=True,
    )
    yield row(
        "whisper/classes",
        "WhisperForAudioClassification",
        "three classes from the encoder",
        WHISPER,
        "spectrum alone",
        num_labels=3,
        use_weighted_layer_sum=False,
        classifier_proj_size=14,
    )
