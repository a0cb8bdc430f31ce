"""Faults of encoders and encoder-decoders."""

import torch
from einops import rearrange
from torch import nn
from torch.nn.functional import interpolate

from flax_attn.proof.faults.fault import Copy, Modify, Patch, Wrap, fault, swapped, zeros
from torch_ref import Mask, Scores, TransformerBlock
from torch_ref.models import dinov2, t5, whisper
from torch_ref.models.bert import Bert
from torch_ref.models.dinov2 import DINOv2, DINOv2Classifier
from torch_ref.models.encoder_decoder import EncoderDecoder
from torch_ref.models.image_encoder import ImageEncoder
from torch_ref.models.t5 import T5
from torch_ref.models.whisper import Whisper
from torch_ref.modules.convolution import Convolution
from torch_ref.modules.cross_attention import CrossAttention
from torch_ref.modules.local import LocalAttention
from torch_ref.modules.patches import Patches

BERT = "bertmaskedlm"


# BERT.
TEXT = (
    fault("no_token_types", "The types of the tokens are ignored.", BERT,
          Wrap(Bert, "embed", lambda embed, model, tokens, positions, key, token_types: embed(
              model, tokens, positions, key))),
    fault("types_of_the_second_sentence",
          "Tokens are of the second sentence where they are of the first.", BERT,
          Wrap(Bert, "embed",
               lambda embed, model, tokens, positions, key, token_types: embed(
                   model, tokens, positions, key, (token_types == 0) + token_types))),
    fault("padding_is_not_trained",
          "The embedding of a token, taken for padding, has no gradient.", BERT,
          Patch("tok_emb", "padding_idx", 1), check="gradients"),
    fault("positions_from_1", "The positions of an encoder are counted from 1.", BERT,
          Wrap(Bert, "embed", lambda embed, model, tokens, positions, *others, **inputs: embed(
              model, tokens, positions + 1, *others, **inputs))),
    fault("no_embedding_norm", "The norm of the embeddings is missing.", BERT,
          Patch("", "emb_norm", nn.Identity())),
    fault("causal_encoder", "A layer of the encoder is causal.", BERT,
          Patch("trf_blocks.0.att", "causal", True)),
    fault("another_number_of_heads",
          "An attention has three heads of width 2, not two of width 3.", BERT,
          Patch("trf_blocks.0.att", "num_heads", 3), Patch("trf_blocks.0.att", "num_kv_heads", 3)),
    fault("no_head_activation", "The activation of the head is missing.", BERT,
          Patch("head", "activation", nn.Identity())),
    fault("no_head_bias", "The bias of the logits is missing.", BERT,
          Modify("head", "bias", zeros)),
)  # fmt: skip


# Layers that attend to neighbours alone.
MODERN = (
    fault("one_sided_window",
          "A local layer attends only to what came before.", "modernbertmaskedlm",
          Wrap(LocalAttention, "_mask",
               lambda mask, layer, given: Mask.sliding_window(layer.reach + 1))),
    fault("window_of_both_halves",
          "A local layer attends to a whole window on either side.", "modernbertmaskedlm",
          Patch("trf_blocks.1.att", "reach", 2)),
    fault("local_layer_everywhere", "A local layer attends to all tokens.", "modernbertmaskedlm",
          Wrap(LocalAttention, "_mask", lambda mask, layer, given: Mask())),
    fault("one_base_of_rotations", "Local layers rotate as full ones do.", "modernbertmaskedlm",
          Copy("trf_blocks.1.att", "rope", "trf_blocks.0.att.rope")),
    fault("fused_halves_swapped",
          "The halves of the fused gate are taken for each other.", "modernbertmaskedlm",
          *swapped("trf_blocks.0.ff.W_gate", "trf_blocks.0.ff.W_up")),
    fault("first_attention_normed",
          "The first attention has a norm before it.", "modernbertmaskedlm",
          Wrap(TransformerBlock, "_before",
               lambda before, block, norm, x: before(
                   block, block.norm2 if norm is None else norm, x))),
)  # fmt: skip


def class_token_last(model, images, *, dropout_key=None):
    """The class token behind the patches."""
    x = model.tokens(images)
    x = torch.cat([x, model.cls_token.expand(*x.shape[:-2], 1, -1)], dim=-2)
    x = x + model.positions(*images.shape[-2:])
    return model.run(model.drop_emb(x), dropout_key=dropout_key)


def channels_last(forward, layer, images):
    """Patches whose pixels have their channels last."""
    sizes = {"p": layer.height, "q": layer.width}
    return layer.proj(rearrange(images, "... c (i p) (j q) -> ... (i j) (p q c)", **sizes))


def by_columns(forward, layer, images):
    """Patches column by column."""
    return (
        forward(layer, images)
        .unflatten(-2, (images.shape[-2] // layer.height, -1))
        .transpose(-3, -2)
        .flatten(-3, -2)
    )


def resized(**options):
    """Return another interpolation of a table of positions."""

    def resize(table, rows, columns):
        image = interpolate(rearrange(table, "i j d -> 1 d i j"), size=(rows, columns), **options)
        return rearrange(image, "1 d i j -> i j d")

    return resize


# Patches, the class token, and positions that are interpolated.
IMAGES = (
    fault("class_token_last", "The class token comes after the patches.", "vit",
          Patch(ImageEncoder, "hidden", class_token_last)),
    fault("channels_last", "The pixels of a patch have their channels last.", "vit",
          Wrap(Patches, "forward", channels_last)),
    fault("no_final_norm", "The norm behind the blocks is missing.", "vit",
          Patch("", "final_norm", None)),
    fault("no_class_position", "The class token has no position.", "vit",
          Wrap(ImageEncoder, "positions", lambda positions, *sizes: torch.cat(
              [torch.zeros_like(positions(*sizes)[:1]), positions(*sizes)[1:]]))),
    fault("no_layer_scale", "The layer scale of an attention is missing.", "dinov2",
          Patch("trf_blocks.0", "post_norm1", None)),
    fault("patches_by_columns", "The patches stand column by column, not row by row.", "vit",
          Wrap(Patches, "forward", by_columns)),
    fault("bilinear_positions", "The positions are interpolated linearly.", "dinov2",
          Patch(dinov2, "resize_bicubic", resized(mode="bilinear"))),
    # PyTorch's kernel with a = -0.5.
    fault("another_bicubic_kernel",
          "The positions are interpolated by JAX's bicubic kernel.", "dinov2",
          Patch(dinov2, "resize_bicubic", resized(mode="bicubic", antialias=True))),
    fault("positions_at_the_corners", "The corners of the positions are aligned.", "dinov2",
          Patch(dinov2, "resize_bicubic", resized(mode="bicubic", align_corners=True))),
    fault("mask_token_added", "The mask token is added to the hidden patches.", "dinov2",
          Patch(DINOv2, "tokens", lambda model, images, masked: model.patches(images)
                + torch.as_tensor(masked)[:, None] * model.mask_token)),
    fault("class_token_in_the_mean", "The mean of the patches holds the class token.", "dinov2",
          Patch(DINOv2Classifier, "predict", lambda model, x: model.classifier(
              torch.cat([x[..., 0, :], x.mean(dim=-2)], dim=-1)))),
)  # fmt: skip


def of_the_first_layer(keep, model, *given):
    """Keys and values of the first layer, for all."""
    return keep(model, *given)[:1] * len(model.dec_blocks)


# Distances, scales, and what the decoder attends to.
T5_FAULTS = (
    fault("scaled_t5_scores", "The scores of T5 are divided by the root of the head width.", "t5",
          Patch("enc_blocks.0.att", "scores", Scores())),
    fault("scaled_cross_scores", "The scores of T5's cross-attention are divided.", "t5",
          Patch("dec_blocks.0.cross", "scores", Scores())),
    fault("causal_buckets_in_the_encoder", "The encoder has the buckets of one direction.", "t5",
          Wrap(t5, "t5_bias",
               lambda bias, *given, **options: bias(*given, **options | {"bidirectional": False}))),
    fault("buckets_up_to_128",
          "The buckets end at a distance of 128, whatever the config says.", "t5",
          Wrap(t5, "t5_bias",
               lambda bias, *given, **options: bias(*given, **options | {"max_distance": 128}))),
    fault("one_table_of_distances", "The decoder has the relative positions of the encoder.", "t5",
          Copy("", "dec_bias", "enc_bias")),
    fault("unscaled_logits", "The logits of a tied head are not divided.", "t5",
          Patch(T5, "logits", EncoderDecoder.logits)),
    fault("no_encoder_norm", "The norm behind the encoder is missing.", "t5",
          Patch("", "enc_norm", nn.Identity())),
    fault("cross_attention_of_one_layer",
          "All layers attend to the keys and values of the first.", "t5",
          Wrap(EncoderDecoder, "keep", of_the_first_layer)),
    fault("cross_attention_of_padding",
          "The cross-attention sees the padding of the encoder.", "t5",
          Wrap(CrossAttention, "keep", lambda keep, layer, encoded, lengths: keep(layer, encoded))),
    fault("cross_attention_to_the_input",
          "The decoder attends to the embeddings, not to what the encoder returned.", "t5",
          Wrap(EncoderDecoder, "encode",
               lambda encode, model, inputs, **options: model.embed_inputs(inputs, None))),
    fault("causal_cross_attention",
          "A token attends to the encoder's tokens up to its own place.", "t5",
          Wrap(CrossAttention, "forward",
               lambda forward, layer, x, kept, **options: torch.cat(
                   [forward(layer, x[:, i : i + 1],
                            kept.replace(length=kept.length.clamp(max=i + 1)), **options)
                    for i in range(x.shape[1])], dim=1))),
)  # fmt: skip

# What comes before the encoder, and the decoder of text.
WHISPER = (
    fault("no_sinusoids", "What is heard has no positions.", "whisper",
          Modify("enc_pos", "weight", zeros)),
    fault("windows_shifted", "The windows of the convolutions are one frame late.", "whisper",
          Wrap(Convolution, "forward", lambda forward, layer, x: forward(layer, x.roll(1, -2)))),
    fault("no_activation_between_convolutions",
          "The activations of the convolutions are missing.", "whisper",
          Patch(whisper, "gelu", lambda x: x)),
    fault("decoder_positions_from_1", "The positions of the decoder are counted from 1.", "whisper",
          Wrap(Whisper, "embed", lambda embed, model, tokens, positions, key: embed(
              model, tokens, positions + 1, key))),
    fault("decoder_not_causal", "A layer of the decoder sees the tokens to come.", "whisper",
          Patch("dec_blocks.0.att", "causal", False)),
)  # fmt: skip

FAULTS = (*TEXT, *MODERN, *IMAGES, *T5_FAULTS, *WHISPER)
