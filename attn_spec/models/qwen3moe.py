"""Qwen3, its mixtures of experts."""

from dataclasses import dataclass
from typing import Any

from attn_spec.hugging_face.fields import Fields
from attn_spec.models.decoder import read_decoder, write_decoder, write_window
from attn_spec.models.qwen3 import Qwen3Config


@dataclass(frozen=True)
class Qwen3MoeConfig(Qwen3Config):
    """The sizes of a Qwen3 with mixtures of experts: those of a `Qwen3Config`, and of the mixtures.

    Args:
        num_experts: number of experts in each mixture.
        top_k: number of experts for each token.
        d_expert: width inside an expert; `d_hidden` is that of the layers without a mixture.
        renormalize: whether the weights of a token's experts are divided by their sum.
        dense_layers: the layers without a mixture, counted from 0.

    Example:
        >>> Qwen3MoeConfig(2048, 6144, 32, 48, num_kv_heads=4, head_dim=128).num_experts
        128
    """

    num_experts: int = 128
    top_k: int = 8
    d_expert: int = 768
    renormalize: bool = True
    dense_layers: tuple[int, ...] = ()


def read_mixture(fields: Fields, dropout: float | None, **options: Any) -> dict[str, Any]:
    """Return the arguments of a `Qwen3MoeConfig` except the window.

    `options` are those of `read_decoder`.
    """
    # Two fields make a layer dense: a step between mixtures, and a list of exceptions.
    layers, step = range(fields.count("num_hidden_layers")), fields.length("decoder_sparse_step", 1)
    dense = fields.optional_integers("mlp_only_layers") or []
    fields = fields.filled(num_key_value_heads=4, norm_topk_prob=False)
    experts = fields.count("num_experts", 128)
    return {
        **read_decoder(fields, dropout, **options),
        "attention_bias": fields.flag("attention_bias", False),
        "num_experts": experts,
        "top_k": fields.integer("num_experts_per_tok", 8),
        "d_expert": fields.integer("moe_intermediate_size", 768),
        "renormalize": fields.flag("norm_topk_prob"),
        # A model without experts is dense throughout.
        "dense_layers": tuple(
            layer for layer in layers if layer in dense or (layer + 1) % step or not experts
        ),
    }


def write_mixture(config: Any) -> dict[str, Any]:
    """Return the fields of `config.json` that `read_mixture` reads, and those of all decoders."""
    return {
        "attention_bias": config.attention_bias,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": config.d_expert,
        "norm_topk_prob": config.renormalize,
        # The list alone says it all, with the step at its default of 1.
        "mlp_only_layers": list(config.dense_layers),
    }


def read(fields: Fields, dropout: float | None) -> Qwen3MoeConfig:
    """Return the config that the fields of a `config.json` describe."""
    fields = fields.under_one_name(num_local_experts="num_experts")
    # A window that is switched off may still have a size in the file.
    used = fields.flag("use_sliding_window", False)
    window = fields.optional_length("sliding_window", 4096) if used else None
    return Qwen3MoeConfig(**read_mixture(fields, dropout), window=window)


def write(config: Qwen3MoeConfig) -> dict[str, Any]:
    """Return the fields of `config.json` that describe a config."""
    return write_decoder(
        "Qwen3Moe",
        config,
        model_type="qwen3_moe",
        use_sliding_window=config.window is not None,
        sliding_window=write_window("Qwen3Moe", config),
        **write_mixture(config),
    )
