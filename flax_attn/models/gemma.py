"""Gemma, the first one."""

from typing import Any, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Integer

from attn_spec.models.gemma import GemmaConfig, read, write
from flax_attn.functional.shapes import Tokens
from flax_attn.models.decoder import Decoder
from flax_attn.models.hugging_face.decoder import DECODER_LAYOUT
from flax_attn.models.hugging_face.family import Family
from flax_attn.modules.multi_head import MultiHeadAttention
from flax_attn.modules.norm import RMSNorm

C = TypeVar("C", bound=GemmaConfig)


class Gemma(Decoder[C]):
    """Gemma: a Llama with GeGLU, scaled embeddings, and norms with the factor `1 + scale`.

    Embeddings are multiplied by `sqrt(d_model)`. Arguments and errors are those of `LanguageModel`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = GemmaConfig(8, 12, 4, 2, num_kv_heads=1, context_length=16, vocab_size=11)
        >>> Gemma(config, rngs=nnx.Rngs(0))(jnp.ones((3, 5), int)).shape
        (3, 5, 11)

    References:
        Gemma Team 2024 (arXiv:2403.08295).
    """

    family = Family({"gemma": read}, write, DECODER_LAYOUT)

    def embed(
        self, tokens: Integer[Array, "*b t"], positions: Array, dropout_key: Array | None
    ) -> Tokens:
        """Return the vectors of tokens, times the square root of their width."""
        x = super().embed(tokens, positions, dropout_key)
        # Rounded, as in training.
        return x * jnp.asarray(self.config.d_model**0.5, x.dtype)

    def attention(self, layer: int, **options: Any) -> MultiHeadAttention:
        """Return the attention of a layer, with biases if the config asks for them."""
        bias = self.config.attention_bias
        return super().attention(layer, qkv_bias=bias, out_bias=bias, **options)

    def norm(self, width: int | None = None, **options: Any) -> RMSNorm:
        """Return a norm whose factor is `1 + scale`."""
        return super().norm(width, zero_centred=True, **options)
