"""Gemma, the first one."""

from typing import Any, TypeVar

import torch
from jaxtyping import Integer
from torch import Tensor

from attn_spec.models.gemma import GemmaConfig
from torch_ref.functional.shapes import Tokens
from torch_ref.models.decoder import Decoder
from torch_ref.modules.multi_head import MultiHeadAttention
from torch_ref.modules.norm import RMSNorm

C = TypeVar("C", bound=GemmaConfig)


class Gemma(Decoder[C]):
    """Gemma: a Llama with GeGLU, scaled embeddings, and norms with the factor `1 + scale`.

    Embeddings are multiplied by `sqrt(d_model)`. Arguments and errors are those of `LanguageModel`.

    Example:
        >>> import torch
        >>> config = GemmaConfig(8, 12, 4, 2, num_kv_heads=1, context_length=16, vocab_size=11)
        >>> Gemma(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])
    """

    def embed(
        self, tokens: Integer[Tensor, "*b t"], positions: Tensor, dropout_key: Tensor | None
    ) -> Tokens:
        """Return the vectors of tokens, times the square root of their width."""
        x = super().embed(tokens, positions, dropout_key)
        # Rounded, as in training.
        factor = torch.tensor(self.config.d_model**0.5, dtype=x.dtype, device=x.device)
        return x * factor

    def attention(self, layer: int, **options: Any) -> MultiHeadAttention:
        """Return the attention of a layer, with biases if the config asks for them."""
        bias = self.config.attention_bias
        return super().attention(layer, qkv_bias=bias, out_bias=bias, **options)

    def norm(self, width: int | None = None, **options: Any) -> RMSNorm:
        """Return a norm whose factor is `1 + scale`."""
        return super().norm(width, zero_centred=True, **options)
