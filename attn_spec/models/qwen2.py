"""Qwen2 and Qwen2.5."""

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
class Qwen2Config(DecoderConfig):
    """The sizes of a Qwen2: those of a `DecoderConfig`.

    Example:
        >>> Qwen2Config(896, 4864, 14, 24, num_kv_heads=2, tied=True).vocab_size
        151936
    """

    context_length: int = 32768
    vocab_size: int = 151936


def read(fields: Fields, dropout: float | None) -> Qwen2Config:
    """Return the config that the fields of a `config.json` describe."""
    # 32 heads are what transformers takes where a file has no field, whatever it has of queries.
    return Qwen2Config(
        **read_decoder(fields.filled(num_key_value_heads=32), dropout), **read_windows(fields)
    )


def write(config: Qwen2Config) -> dict[str, Any]:
    """Return the fields of `config.json` that describe a config."""
    return write_decoder("Qwen2", config, **write_windows(config))
