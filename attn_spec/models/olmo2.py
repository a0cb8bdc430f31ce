"""OLMo 2."""

from dataclasses import dataclass
from typing import Any

from attn_spec.hugging_face.fields import Fields
from attn_spec.models.decoder import DecoderConfig, check_no_window, read_decoder, write_decoder


@dataclass(frozen=True)
class Olmo2Config(DecoderConfig):
    """The sizes of an OLMo 2: those of a `DecoderConfig`, and biases.

    Args:
        attention_bias: whether the four projections of the attention have a bias.

    Example:
        >>> Olmo2Config(4096, 11008, num_heads=32, num_layers=32).eps
        1e-05
    """

    vocab_size: int = 50304
    eps: float = 1e-5
    attention_bias: bool = False


def read(fields: Fields, dropout: float | None) -> Olmo2Config:
    """Return the config that the fields of a `config.json` describe."""
    arguments = read_decoder(fields.filled(rms_norm_eps=1e-5), dropout)
    return Olmo2Config(**arguments, attention_bias=fields.flag("attention_bias", False))


def write(config: Olmo2Config) -> dict[str, Any]:
    """Return the fields of `config.json` that describe a config."""
    # A window came with OLMo 3, which is another model of transformers.
    check_no_window("OLMo 2", config)
    return write_decoder("Olmo2", config, attention_bias=config.attention_bias)
