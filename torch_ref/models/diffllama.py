"""DiffLlama."""

from typing import Any

from attn_spec.models.diffllama import DiffLlamaConfig
from torch_ref.models.decoder import Decoder
from torch_ref.modules.differential import DifferentialAttention, differential_lambda
from torch_ref.modules.multi_head import MultiHeadAttention


class DiffLlama(Decoder[DiffLlamaConfig]):
    """DiffLlama: a Llama with differential attention.

    Arguments and errors are those of `LanguageModel`.

    Example:
        >>> import torch
        >>> config = DiffLlamaConfig(
        ...     8, 12, num_heads=4, num_layers=2, context_length=16, vocab_size=11)
        >>> DiffLlama(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])
    """

    attention_type = DifferentialAttention

    def attention(self, layer: int, **options: Any) -> MultiHeadAttention:
        """Return the attention of a layer, whose lambda starts near that of the paper."""
        config = self.config
        return super().attention(
            layer,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            # Deeper layers subtract more, as in the paper.
            lambda_init=differential_lambda(layer),
            eps=config.eps,
            **options,
        )
