"""Gemma, the first one."""

from dataclasses import dataclass
from typing import Any

from attn_spec.hugging_face.fields import GEMMA_ACTIVATIONS, Fields
from attn_spec.models.decoder import DecoderConfig, check_no_window, read_decoder, write_decoder


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


def read(fields: Fields, dropout: float | None) -> GemmaConfig:
    """Return the config that the fields of a `config.json` describe."""
    fields = fields.filled(hidden_act="gelu_pytorch_tanh", num_key_value_heads=16, head_dim=256)
    fields = fields.filled(tie_word_embeddings=True)
    # With it a token attends to later ones too, which a decoder does not.
    fields.only(use_bidirectional_attention=False)
    arguments = read_decoder(fields, dropout)
    # The first files said so, and transformers reads it as the tanh form.
    if arguments["activation"] == "gelu_exact":
        arguments["activation"] = "gelu_tanh"
    return GemmaConfig(**arguments, attention_bias=fields.flag("attention_bias", False))


def write(config: GemmaConfig) -> dict[str, Any]:
    """Return the fields of `config.json` that describe a config."""
    check_no_window("Gemma", config)
    # Written under its own name it would be read back as another function.
    if config.activation == "gelu_exact":
        raise ValueError(
            "transformers' Gemma takes the tanh form of GELU for the exact one; got"
            " activation='gelu_exact'. Save with flax_attn.convert.save"
        )
    activation = GEMMA_ACTIVATIONS[config.activation]
    return write_decoder(
        "Gemma", config, hidden_act=activation, attention_bias=config.attention_bias
    )
