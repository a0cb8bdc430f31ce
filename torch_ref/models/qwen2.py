"""Qwen2 and Qwen2.5."""

from typing import Any

from attn_spec.models.qwen2 import Qwen2Config
from torch_ref.models.decoder import Decoder
from torch_ref.modules.multi_head import MultiHeadAttention


class Qwen2(Decoder[Qwen2Config]):
    """Qwen2: a Llama with biases of queries, keys and values, and windows in some layers.

    Arguments and errors are those of `LanguageModel`.

    Example:
        >>> import torch
        >>> config = Qwen2Config(8, 12, 4, 2, num_kv_heads=2, context_length=16, vocab_size=11)
        >>> Qwen2(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])
    """

    def attention(self, layer: int, **options: Any) -> MultiHeadAttention:
        """Return the attention of a layer, with biases of queries, keys and values."""
        return super().attention(layer, qkv_bias=True, **options)
