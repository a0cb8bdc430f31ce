"""Qwen3, its dense models."""

from typing import Any

from attn_spec.models.qwen3 import Qwen3Config, read, write
from flax_attn.models.decoder import Decoder
from flax_attn.models.hugging_face.decoder import DECODER_LAYOUT
from flax_attn.models.hugging_face.family import Family
from flax_attn.modules.multi_head import MultiHeadAttention


class Qwen3(Decoder[Qwen3Config]):
    """Qwen3: a Llama with query and key norms in each head, and windows in some layers.

    Arguments and errors are those of `LanguageModel`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = Qwen3Config(8, 12, 4, 2, num_kv_heads=2, context_length=16, vocab_size=11)
        >>> Qwen3(config, rngs=nnx.Rngs(0))(jnp.ones((3, 5), int)).shape
        (3, 5, 11)

    References:
        Qwen Team 2025 (arXiv:2505.09388).
    """

    family = Family({"qwen3": read}, write, DECODER_LAYOUT)

    def attention(self, layer: int, **options: Any) -> MultiHeadAttention:
        """Return the attention of a layer, with biases if the config asks for them."""
        bias = self.config.attention_bias
        return super().attention(layer, qkv_bias=bias, out_bias=bias, **options)

    def head_norms(self, **numerics: Any) -> dict[str, Any]:
        """Return the norms of queries and keys, each head by itself."""
        return {
            name: self.norm(self.config.head_width, **numerics) for name in ("q_norm", "k_norm")
        }
