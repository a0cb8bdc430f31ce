"""Llama and Mistral."""

from dataclasses import dataclass
from typing import Any, TypeVar

from flax_attn.models.decoder import Decoder, DecoderConfig
from flax_attn.models.hugging_face.decoder import DECODER_LAYOUT, read_decoder, write_decoder
from flax_attn.models.hugging_face.family import Family
from flax_attn.models.hugging_face.fields import Fields
from flax_attn.modules.feed_forward import GatedFeedForward
from flax_attn.modules.multi_head import MultiHeadAttention


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """The sizes of a Llama, or of a Mistral: those of a `DecoderConfig`, and biases.

    A Mistral has a window.

    Args:
        attention_bias: whether the four projections of the attention have a bias.
        ff_bias: whether the feed-forward layer has biases.

    Example:
        >>> LlamaConfig(4096, 14336, num_heads=32, num_layers=32, num_kv_heads=8).num_kv_heads
        8
    """

    attention_bias: bool = False
    ff_bias: bool = False


def _read_llama(fields: Fields, dropout: float | None) -> LlamaConfig:
    fields.only(
        sliding_window=None
    )  # transformers' Llama applies it to the cache but not to the mask
    return LlamaConfig(
        **read_decoder(fields, dropout),
        attention_bias=fields.flag("attention_bias", False),
        ff_bias=fields.flag("mlp_bias", False),
    )


def _read_mistral(fields: Fields, dropout: float | None) -> LlamaConfig:
    window = fields.optional_length("sliding_window", 4096)
    return LlamaConfig(**read_decoder(fields.filled(num_key_value_heads=8), dropout), window=window)


def _write(config: LlamaConfig) -> dict[str, Any]:
    return _write_mistral(config) if any(config.windows) else _write_llama(config)


def _write_llama(config: LlamaConfig) -> dict[str, Any]:
    if config.d_model % config.num_heads:
        raise ValueError(
            "in transformers' Llama num_heads must divide d_model, whatever head_dim is; got"
            f" d_model={config.d_model}, num_heads={config.num_heads}. Save with"
            " flax_attn.convert.save"
        )
    return write_decoder(
        "Llama", config, attention_bias=config.attention_bias, mlp_bias=config.ff_bias
    )


def _write_mistral(config: LlamaConfig) -> dict[str, Any]:
    if config.attention_bias or config.ff_bias:
        raise ValueError(
            "a Llama with a window is stored as Mistral, which has no biases; got"
            f" attention_bias={config.attention_bias}, ff_bias={config.ff_bias}. Save with"
            " flax_attn.convert.save"
        )
    if config.full_layers:
        raise ValueError(
            "a Llama with a window is stored as Mistral, which has it in every layer; got "
            f"full_layers={config.full_layers}. Save with flax_attn.convert.save"
        )
    return write_decoder("Mistral", config, sliding_window=config.window)


C = TypeVar("C", bound=LlamaConfig)


class Llama(Decoder[C]):
    """Llama: rotary positions, RMS norms before the sublayers, grouped queries, SwiGLU.

    With a window it is Mistral. The arguments are those of `LanguageModel`.

    Raises:
        ValueError: where its layers do.

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

    family = Family({"llama": _read_llama, "mistral": _read_mistral}, _write, DECODER_LAYOUT)

    def attention(self, layer: int, **options: Any) -> MultiHeadAttention:
        """Return the attention of a layer, with biases if the config asks for them."""
        bias = self.config.attention_bias
        return super().attention(layer, qkv_bias=bias, out_bias=bias, **options)

    def feed_forward(self, layer: int, **options: Any) -> GatedFeedForward:
        """Return the feed-forward part of a layer, with biases if the config asks for them."""
        return super().feed_forward(layer, bias=self.config.ff_bias, **options)
