"""Qwen2 and Qwen2.5."""

from dataclasses import dataclass
from typing import Any

from flax_attn.models.decoder import Decoder, DecoderConfig
from flax_attn.models.hugging_face.decoder import (
    DECODER_LAYOUT,
    read_decoder,
    read_windows,
    write_decoder,
    write_windows,
)
from flax_attn.models.hugging_face.family import Family
from flax_attn.models.hugging_face.fields import Fields
from flax_attn.modules.multi_head import MultiHeadAttention


@dataclass(frozen=True)
class Qwen2Config(DecoderConfig):
    """The sizes of a Qwen2: those of a `DecoderConfig`.

    Example:
        >>> Qwen2Config(896, 4864, 14, 24, num_kv_heads=2, tied=True).vocab_size
        151936
    """

    context_length: int = 32768
    vocab_size: int = 151936


def _read(fields: Fields, dropout: float | None) -> Qwen2Config:
    return Qwen2Config(
        **read_decoder(fields.filled(num_key_value_heads=32), dropout), **read_windows(fields)
    )


def _write(config: Qwen2Config) -> dict[str, Any]:
    return write_decoder("Qwen2", config, **write_windows(config))


class Qwen2(Decoder[Qwen2Config]):
    """Qwen2: a Llama with biases of queries, keys and values, and windows in some layers.

    The arguments are those of `LanguageModel`.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = Qwen2Config(8, 12, 4, 2, num_kv_heads=2, context_length=16, vocab_size=11)
        >>> Qwen2(config, rngs=nnx.Rngs(0))(jnp.ones((3, 5), int)).shape
        (3, 5, 11)

    References:
        Qwen Team 2024 (arXiv:2407.10671).
    """

    family = Family({"qwen2": _read}, _write, DECODER_LAYOUT)

    def attention(self, layer: int, **options: Any) -> MultiHeadAttention:
        """Return the attention of a layer, with biases of queries, keys and values."""
        return super().attention(layer, qkv_bias=True, **options)
