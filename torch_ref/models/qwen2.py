"""Qwen2 and Qwen2.5."""

from dataclasses import dataclass
from typing import Any

from torch_ref.models.decoder import Decoder, DecoderConfig
from torch_ref.modules.multi_head import MultiHeadAttention


@dataclass(frozen=True)
class Qwen2Config(DecoderConfig):
    """The sizes of a Qwen2: those of a `DecoderConfig`.

    Example:
        >>> Qwen2Config(896, 4864, 14, 24, num_kv_heads=2, tied=True).vocab_size
        151936
    """

    context_length: int = 32768
    vocab_size: int = 151936


class Qwen2(Decoder[Qwen2Config]):
    """Qwen2: a Llama with biases of queries, keys and values, and windows in some layers.

    The arguments are those of `LanguageModel`.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> import torch
        >>> config = Qwen2Config(8, 12, 4, 2, num_kv_heads=2, context_length=16, vocab_size=11)
        >>> Qwen2(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])

    References:
        Qwen Team 2024 (arXiv:2407.10671).
    """

    def attention(self, layer: int, **options: Any) -> MultiHeadAttention:
        """Return the attention of a layer, with biases of queries, keys and values."""
        return super().attention(layer, qkv_bias=True, **options)
