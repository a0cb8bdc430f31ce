"""Llama and Mistral."""

from typing import Any, TypeVar

from attn_spec.models.llama import LlamaConfig
from torch_ref.models.decoder import Decoder
from torch_ref.modules.feed_forward import GatedFeedForward
from torch_ref.modules.multi_head import MultiHeadAttention

C = TypeVar("C", bound=LlamaConfig)


class Llama(Decoder[C]):
    """Llama: rotary positions, RMS norms before the sublayers, grouped queries, SwiGLU.

    With a window it is Mistral. Arguments and errors are those of `LanguageModel`.

    Example:
        >>> import torch
        >>> config = LlamaConfig(8, 12, 4, 2, num_kv_heads=2, context_length=16, vocab_size=11)
        >>> Llama(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])
    """

    def attention(self, layer: int, **options: Any) -> MultiHeadAttention:
        """Return the attention of a layer, with biases if the config asks for them."""
        # One option for all four projections, as in transformers.
        bias = self.config.attention_bias
        return super().attention(layer, qkv_bias=bias, out_bias=bias, **options)

    def feed_forward(self, layer: int, **options: Any) -> GatedFeedForward:
        """Return the feed-forward part of a layer, with biases if the config asks for them."""
        return super().feed_forward(layer, bias=self.config.ff_bias, **options)
