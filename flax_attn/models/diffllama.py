"""DiffLlama."""

from dataclasses import dataclass
from typing import Any

from flax_attn.convert.rules import Rule
from flax_attn.models.decoder import Decoder, DecoderConfig
from flax_attn.models.hugging_face.decoder import (
    check_no_window,
    decoder_layout,
    read_decoder,
    write_decoder,
)
from flax_attn.models.hugging_face.family import Family
from flax_attn.models.hugging_face.fields import Fields
from flax_attn.modules.differential import DifferentialAttention, differential_lambda
from flax_attn.modules.multi_head import MultiHeadAttention


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


_LAMBDAS = tuple(
    Rule((f"trf_blocks.{{i}}.att.{name}",), f"model.layers.{{i}}.self_attn.{name}")
    for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
)


def _read(fields: Fields, dropout: float | None) -> DiffLlamaConfig:
    fields.only(attention_dropout=0.0)  # transformers has no dropout here
    arguments = read_decoder(fields.filled(rms_norm_eps=1e-5), dropout)
    return DiffLlamaConfig(**arguments, attention_bias=fields.flag("attention_bias", False))


def _write(config: DiffLlamaConfig) -> dict[str, Any]:
    check_no_window("DiffLlama", config)
    if config.dropout:
        raise ValueError(
            f"transformers' DiffLlama has no dropout; got dropout={config.dropout}. Save with"
            " flax_attn.convert.save"
        )
    return write_decoder("DiffLlama", config, attention_bias=config.attention_bias)


class DiffLlama(Decoder[DiffLlamaConfig]):
    """DiffLlama: a Llama with differential attention.

    The arguments are those of `LanguageModel`.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = DiffLlamaConfig(
        ...     8, 12, num_heads=4, num_layers=2, context_length=16, vocab_size=11)
        >>> DiffLlama(config, rngs=nnx.Rngs(0))(jnp.ones((3, 5), int)).shape
        (3, 5, 11)

    References:
        Ye et al. 2024 (arXiv:2410.05258).
    """

    family = Family({"diffllama": _read}, _write, decoder_layout(*_LAMBDAS))

    attention_type = DifferentialAttention

    def attention(self, layer: int, **options: Any) -> MultiHeadAttention:
        """Return the attention of a layer, whose lambda starts near that of the paper."""
        config = self.config
        return super().attention(
            layer,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            lambda_init=differential_lambda(layer),
            eps=config.eps,
            **options,
        )
