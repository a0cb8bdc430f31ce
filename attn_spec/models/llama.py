"""Llama and Mistral."""

from dataclasses import dataclass
from typing import Any

from attn_spec.hugging_face.fields import Fields
from attn_spec.models.decoder import DecoderConfig, read_decoder, write_decoder


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


def read_llama(fields: Fields, dropout: float | None) -> LlamaConfig:
    """Return the config that the fields of a `config.json` describe."""
    # transformers' Llama applies a window to the cache, but not to the mask.
    fields.only(sliding_window=None)
    return LlamaConfig(
        **read_decoder(fields, dropout),
        attention_bias=fields.flag("attention_bias", False),
        ff_bias=fields.flag("mlp_bias", False),
    )


def read_mistral(fields: Fields, dropout: float | None) -> LlamaConfig:
    """Return the config that the fields of a Mistral's `config.json` describe."""
    # A file may say null, which is no window: 4096 is for those without the field.
    window = fields.optional_length("sliding_window", 4096)
    return LlamaConfig(**read_decoder(fields.filled(num_key_value_heads=8), dropout), window=window)


def write(config: LlamaConfig) -> dict[str, Any]:
    """Return the fields of `config.json` that describe a config."""
    # transformers' Llama has no window, and a Mistral without one would be a Llama.
    return _write_mistral(config) if any(config.windows) else _write_llama(config)


def _write_llama(config: LlamaConfig) -> dict[str, Any]:
    # transformers' config refuses this even where head_dim is given.
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
