"""Qwen2 and Qwen2.5."""

from typing import Any

from attn_spec.models.qwen2 import Qwen2Config, read, write
from flax_attn.models.decoder import Decoder
from flax_attn.models.hugging_face.decoder import DECODER_LAYOUT
from flax_attn.models.hugging_face.family import Family
from flax_attn.modules.multi_head import MultiHeadAttention


class Qwen2(Decoder[Qwen2Config]):
    """Qwen2: a Llama with biases of queries, keys and values, and windows in some layers.

    Arguments and errors are those of `LanguageModel`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = Qwen2Config(8, 12, 4, 2, num_kv_heads=2, context_length=16, vocab_size=11)
        >>> Qwen2(config, rngs=nnx.Rngs(0))(jnp.ones((3, 5), int)).shape
        (3, 5, 11)

    References:
        Qwen Team 2024 (arXiv:2407.10671).
    """

    family = Family({"qwen2": read}, write, DECODER_LAYOUT)

    def attention(self, layer: int, **options: Any) -> MultiHeadAttention:
        """Return the attention of a layer, with biases of queries, keys and values."""
        return super().attention(layer, qkv_bias=True, **options)
