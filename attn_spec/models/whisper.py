"""Whisper: an encoder-decoder from sound to text."""

from dataclasses import dataclass
from typing import Any

from attn_spec.hugging_face.fields import ACTIVATIONS, THEIR_ACTIVATIONS, Fields


@dataclass(frozen=True)
class WhisperConfig:
    """The sizes of a Whisper.

    Args:
        d_model: width of the tokens.
        num_heads: number of heads of the encoder.
        num_layers: number of blocks of the encoder.
        num_decoder_heads: number of heads of the decoder.
        num_decoder_layers: number of blocks of the decoder.
        d_hidden: width inside the feed-forward layers of the encoder.
        d_decoder_hidden: width inside the feed-forward layers of the decoder.
        num_mel: number of mel bands.
        num_positions: number of tokens of the encoder, half the number of its input frames.
        context_length: length of the longest text.
        vocab_size: number of tokens.
        activation: activation of the feed-forward layers.
        dropout: the probability that an element of an embedding or a sublayer's output is dropped
            in train mode.
        attention_dropout: the probability that an attention weight is dropped in train mode.
        start_token: token that the decoder begins with.

    Example:
        >>> WhisperConfig(384, 6, 4, 6, 4, 1536, 1536).num_positions
        1500
    """

    d_model: int
    num_heads: int
    num_layers: int
    num_decoder_heads: int
    num_decoder_layers: int
    d_hidden: int
    d_decoder_hidden: int
    num_mel: int = 80
    num_positions: int = 1500
    context_length: int = 448
    vocab_size: int = 51865
    activation: str = "gelu_exact"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    start_token: int = 50257

    # Files with a head of its own are refused.
    @property
    def tied(self) -> bool:
        """Whether the output head is the table of the tokens."""
        return True


def read(fields: Fields, dropout: float | None) -> WhisperConfig:
    """Return the config that the fields of a `config.json` describe."""
    # The usual names mean the encoder.
    fields = fields.under_one_name(
        hidden_size="d_model",
        num_attention_heads="encoder_attention_heads",
        num_key_value_heads="encoder_attention_heads",
        num_hidden_layers="encoder_layers",
    )
    # Drops that are no part of this model, and are 0 in the published files.
    fields.only(
        activation_dropout=0.0,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        is_encoder_decoder=True,
    )
    fields.only(scale_embedding=False, tie_word_embeddings=True, apply_spec_augment=False)
    return WhisperConfig(
        d_model=fields.integer("d_model"),
        num_heads=fields.heads("encoder_attention_heads"),
        num_layers=fields.count("encoder_layers"),
        num_decoder_heads=fields.heads("decoder_attention_heads"),
        num_decoder_layers=fields.count("decoder_layers"),
        d_hidden=fields.integer("encoder_ffn_dim"),
        d_decoder_hidden=fields.integer("decoder_ffn_dim"),
        num_mel=fields.integer("num_mel_bins", 80),
        num_positions=fields.length("max_source_positions", 1500),
        context_length=fields.length("max_target_positions", 448),
        vocab_size=fields.integer("vocab_size"),
        activation=fields.choose("activation_function", ACTIVATIONS, "gelu"),
        dropout=fields.rate("dropout", 0.0) if dropout is None else dropout,
        attention_dropout=fields.rate("attention_dropout", 0.0) if dropout is None else dropout,
        start_token=fields.token("decoder_start_token_id", 50257),
    )


def write(config: WhisperConfig) -> dict[str, Any]:
    """Return the fields of `config.json` that describe a config."""
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "d_model": config.d_model,
        "encoder_attention_heads": config.num_heads,
        "encoder_layers": config.num_layers,
        "decoder_attention_heads": config.num_decoder_heads,
        "decoder_layers": config.num_decoder_layers,
        "encoder_ffn_dim": config.d_hidden,
        "decoder_ffn_dim": config.d_decoder_hidden,
        "num_mel_bins": config.num_mel,
        "max_source_positions": config.num_positions,
        "max_target_positions": config.context_length,
        "vocab_size": config.vocab_size,
        "activation_function": THEIR_ACTIVATIONS[config.activation],
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "decoder_start_token_id": config.start_token,
    }
