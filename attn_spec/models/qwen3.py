"""Qwen3, its dense models."""

from dataclasses import dataclass
from typing import Any

from attn_spec.hugging_face.fields import Fields
from attn_spec.models.decoder import (
    DecoderConfig,
    read_decoder,
    read_windows,
    write_decoder,
    write_windows,
)


@dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    """The sizes of a Qwen3: those of a `DecoderConfig`, and biases.

    Args:
        attention_bias: whether the four projections of the attention have a bias.

    Example:
        >>> config = Qwen3Config(1024, 3072, 16, 28, num_kv_heads=8, head_dim=128, tied=True)
        >>> config.vocab_size
        151936
    """

    context_length: int = 32768
    vocab_size: int = 151936
    attention_bias: bool = False


def read(fields: Fields, dropout: float | None) -> Qwen3Config:
    """Return the config that the fields of a `config.json` describe."""
    # Unlike a Llama's, the width of a head does not follow from d_model.
    arguments = read_decoder(fields.filled(num_key_value_heads=32, head_dim=128), dropout)
    return Qwen3Config(
        **arguments, **read_windows(fields), attention_bias=fields.flag("attention_bias", False)
    )


def write(config: Qwen3Config) -> dict[str, Any]:
    """Return the fields of `config.json` that describe a config."""
    return write_decoder(
        "Qwen3", config, **write_windows(config), attention_bias=config.attention_bias
    )
