"""DiffLlama."""

from dataclasses import dataclass
from typing import Any

from attn_spec.hugging_face.fields import Fields
from attn_spec.models.decoder import DecoderConfig, check_no_window, read_decoder, write_decoder


@dataclass(frozen=True)
class DiffLlamaConfig(DecoderConfig):
    """The sizes of a DiffLlama: those of a `DecoderConfig`, and biases.

    Args:
        attention_bias: whether the four projections of the attention have a bias.

    Example:
        >>> DiffLlamaConfig(2048, 8192, num_heads=32, num_layers=16).eps
        1e-05
    """

    eps: float = 1e-5
    attention_bias: bool = False


def read(fields: Fields, dropout: float | None) -> DiffLlamaConfig:
    """Return the config that the fields of a `config.json` describe."""
    # transformers has no dropout here.
    fields.only(attention_dropout=0.0)
    arguments = read_decoder(fields.filled(rms_norm_eps=1e-5), dropout)
    return DiffLlamaConfig(**arguments, attention_bias=fields.flag("attention_bias", False))


def write(config: DiffLlamaConfig) -> dict[str, Any]:
    """Return the fields of `config.json` that describe a config."""
    # What transformers does not compute is refused before anything is written.
    check_no_window("DiffLlama", config)
    if config.dropout:
        raise ValueError(
            f"transformers' DiffLlama has no dropout; got dropout={config.dropout}. Save with"
            " flax_attn.convert.save"
        )
    return write_decoder("DiffLlama", config, attention_bias=config.attention_bias)
