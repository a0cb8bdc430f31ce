"""Qwen3, its dense models."""

from typing import Any

from attn_spec.models.qwen3 import Qwen3Config
from torch_ref.models.decoder import Decoder
from torch_ref.modules.multi_head import MultiHeadAttention


class Qwen3(Decoder[Qwen3Config]):
    """Qwen3: a Llama with query and key norms in each head, and windows in some layers.

    Arguments and errors are those of `LanguageModel`.

    Example:
        >>> import torch
        >>> config = Qwen3Config(8, 12, 4, 2, num_kv_heads=2, context_length=16, vocab_size=11)
        >>> Qwen3(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])
    """

    def attention(self, layer: int, **options: Any) -> MultiHeadAttention:
        """Return the attention of a layer, with biases if the config asks for them."""
        bias = self.config.attention_bias
        return super().attention(layer, qkv_bias=bias, out_bias=bias, **options)

    def head_norms(self) -> dict[str, Any]:
        """Return the norms of queries and keys, each head by itself."""
        # As wide as one head, which tells the attention not to join them.
        return {name: self.norm(self.config.head_width) for name in ("q_norm", "k_norm")}
