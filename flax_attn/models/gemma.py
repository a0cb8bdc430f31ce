"""Gemma, the first one."""

from dataclasses import dataclass
from typing import Any, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Integer

from flax_attn.functional.shapes import Tokens
from flax_attn.models.decoder import Decoder, DecoderConfig
from flax_attn.models.hugging_face.decoder import (
    DECODER_LAYOUT,
    check_no_window,
    read_decoder,
    write_decoder,
)
from flax_attn.models.hugging_face.family import Family
from flax_attn.models.hugging_face.fields import GEMMA_ACTIVATIONS, Fields
from flax_attn.modules.multi_head import MultiHeadAttention
from flax_attn.modules.norm import RMSNorm


@dataclass(frozen=True)
class GemmaConfig(DecoderConfig):
    """The sizes of a Gemma: those of a `DecoderConfig`, and biases.

    Args:
        attention_bias: whether the four projections of the attention have a bias.

    Example:
        >>> config = GemmaConfig(2048, 16384, 8, 18, num_kv_heads=1, head_dim=256)
        >>> config.activation
        'gelu_tanh'
    """

    context_length: int = 8192
    vocab_size: int = 256000
    activation: str = "gelu_tanh"
    tied: bool = True
    attention_bias: bool = False


def _read(fields: Fields, dropout: float | None) -> GemmaConfig:
    fields = fields.filled(hidden_act="gelu_pytorch_tanh", num_key_value_heads=16, head_dim=256)
    fields = fields.filled(tie_word_embeddings=True)
    fields.only(use_bidirectional_attention=False)
    arguments = read_decoder(fields, dropout)
    if (
        arguments["activation"] == "gelu_exact"
    ):  # what the first files said, and transformers reads as the tanh form
        arguments["activation"] = "gelu_tanh"
    return GemmaConfig(**arguments, attention_bias=fields.flag("attention_bias", False))


def _write(config: GemmaConfig) -> dict[str, Any]:
    check_no_window("Gemma", config)
    if config.activation == "gelu_exact":
        raise ValueError(
            "transformers' Gemma takes the tanh form of GELU for the exact one; got"
            " activation='gelu_exact'. Save with flax_attn.convert.save"
        )
    activation = GEMMA_ACTIVATIONS[config.activation]
    return write_decoder(
        "Gemma", config, hidden_act=activation, attention_bias=config.attention_bias
    )


C = TypeVar("C", bound=GemmaConfig)


class Gemma(Decoder[C]):
    """Gemma: a Llama with GeGLU, scaled embeddings, and norms with the factor `1 + scale`.

    Embeddings are multiplied by `sqrt(d_model)`. The arguments are those of `LanguageModel`.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = GemmaConfig(8, 12, 4, 2, num_kv_heads=1, context_length=16, vocab_size=11)
        >>> Gemma(config, rngs=nnx.Rngs(0))(jnp.ones((3, 5), int)).shape
        (3, 5, 11)

    References:
        Gemma Team 2024 (arXiv:2403.08295).
    """

    family = Family({"gemma": _read}, _write, DECODER_LAYOUT)

    def embed(
        self, tokens: Integer[Array, "*b t"], positions: Array, dropout_key: Array | None
    ) -> Tokens:
        """Return the vectors of tokens, times the square root of their width."""
        x = super().embed(tokens, positions, dropout_key)
        return x * jnp.asarray(self.config.d_model**0.5, x.dtype)  # rounded, as in training

    def attention(self, layer: int, **options: Any) -> MultiHeadAttention:
        """Return the attention of a layer, with biases if the config asks for them."""
        bias = self.config.attention_bias
        return super().attention(layer, qkv_bias=bias, out_bias=bias, **options)

    def norm(self, width: int | None = None, **options: Any) -> RMSNorm:
        """Return a norm whose factor is `1 + scale`."""
        return super().norm(width, zero_centred=True, **options)
