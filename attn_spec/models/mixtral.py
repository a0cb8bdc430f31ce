"""Mixtral."""

from dataclasses import dataclass
from typing import Any

from attn_spec.hugging_face.fields import Fields
from attn_spec.models.decoder import DecoderConfig, read_decoder, write_decoder, write_window


@dataclass(frozen=True)
class MixtralConfig(DecoderConfig):
    """The sizes of a Mixtral: those of a `DecoderConfig`, and of the mixture.

    `d_hidden` is the width inside an expert.

    Args:
        num_experts: number of experts in each layer.
        top_k: number of experts for each token.

    Example:
        >>> MixtralConfig(4096, 14336, num_heads=32, num_layers=32, num_kv_heads=8).num_experts
        8
    """

    # As in the published files.
    eps: float = 1e-5
    num_experts: int = 8
    top_k: int = 2


def read(fields: Fields, dropout: float | None) -> MixtralConfig:
    """Return the config that the fields of a `config.json` describe."""
    # transformers takes both names.
    fields = fields.under_one_name(num_experts="num_local_experts")
    # Noise in the router is of training alone, and is not drawn here.
    fields.only(router_jitter_noise=0.0)
    filled = fields.filled(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6)
    return MixtralConfig(
        **read_decoder(filled, dropout),
        window=fields.optional_length("sliding_window"),
        num_experts=fields.count("num_local_experts", 8),
        top_k=fields.integer("num_experts_per_tok", 2),
    )


def write(config: MixtralConfig) -> dict[str, Any]:
    """Return the fields of `config.json` that describe a config."""
    return write_decoder(
        "Mixtral",
        config,
        sliding_window=write_window("Mixtral", config),
        num_local_experts=config.num_experts,
        num_experts_per_tok=config.top_k,
    )
