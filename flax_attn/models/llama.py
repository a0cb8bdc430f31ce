"""Llama and Mistral."""

from typing import Any, TypeVar

from attn_spec.models.llama import LlamaConfig, read_llama, read_mistral, write
from flax_attn.models.decoder import Decoder
from flax_attn.models.hugging_face.decoder import DECODER_LAYOUT
from flax_attn.models.hugging_face.family import Family
from flax_attn.modules.feed_forward import GatedFeedForward
from flax_attn.modules.multi_head import MultiHeadAttention

C = TypeVar("C", bound=LlamaConfig)


class Llama(Decoder[C]):
    """Llama: rotary positions, RMS norms before the sublayers, grouped queries, SwiGLU.

    With a window it is Mistral. Arguments and errors are those of `LanguageModel`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = LlamaConfig(8, 12, 4, 2, num_kv_heads=2, context_length=16, vocab_size=11)
        >>> Llama(config, rngs=nnx.Rngs(0))(jnp.ones((3, 5), int)).shape
        (3, 5, 11)

    References:
        Touvron et al. 2023 (arXiv:2302.13971); Llama Team 2024 (arXiv:2407.21783); Jiang et al.
        2023, Mistral (arXiv:2310.06825).
    """

    family = Family({"llama": read_llama, "mistral": read_mistral}, write, DECODER_LAYOUT)

    def attention(self, layer: int, **options: Any) -> MultiHeadAttention:
        """Return the attention of a layer, with biases if the config asks for them."""
        # One option for all four projections, as in transformers.
        bias = self.config.attention_bias
        return super().attention(layer, qkv_bias=bias, out_bias=bias, **options)

    def feed_forward(self, layer: int, **options: Any) -> GatedFeedForward:
        """Return the feed-forward part of a layer, with biases if the config asks for them."""
        return super().feed_forward(layer, bias=self.config.ff_bias, **options)
