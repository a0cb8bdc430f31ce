"""gpt-oss."""

from dataclasses import dataclass, field
from typing import Any

from attn_spec.hugging_face.fields import Fields
from attn_spec.models.decoder import (
    FULL,
    SLIDING,
    DecoderConfig,
    read_decoder,
    read_layer_types,
    write_decoder,
    write_layer_types,
)
from attn_spec.swiglu import SwiGLUBounds


@dataclass(frozen=True)
class GptOssConfig(DecoderConfig):
    """The sizes of a gpt-oss: those of a `DecoderConfig`, and of the mixtures.

    `d_hidden` is the width inside an expert.

    Args:
        attention_bias: whether the four projections of the attention have a bias.
        num_experts: number of experts in each layer.
        top_k: number of experts for each token.
        swiglu: the activation of the experts.

    Example:
        >>> config = GptOssConfig(2880, 2880, 64, 24, num_kv_heads=8, head_dim=64, num_experts=32)
        >>> config.top_k
        4
    """

    context_length: int = 131072
    vocab_size: int = 201088
    eps: float = 1e-5
    attention_bias: bool = True
    num_experts: int = 128
    top_k: int = 4
    swiglu: SwiGLUBounds = field(default_factory=SwiGLUBounds)


# What transformers takes where a file says nothing of positions: YaRN, as in the published models.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read(fields: Fields, dropout: float | None) -> GptOssConfig:
    """Return the config that the fields of a `config.json` describe."""
    fields = fields.under_one_name(num_experts="num_local_experts")
    layers = range(fields.count("num_hidden_layers"))
    ropes = [fields.values.get(name) for name in ("rope_scaling", "rope_parameters")]
    if ropes == [None, None]:
        fields = Fields(fields.where, {**fields.values, "rope_parameters": _ROPE}, fields.used)
    filled = fields.filled(
        head_dim=64,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        sliding_window=128,
        rope_theta=150000.0,
    )
    # By default every second layer has the window, beginning with the first.
    kinds = [FULL if layer % 2 else SLIDING for layer in layers]
    return GptOssConfig(
        **read_decoder(filled, dropout),
        **read_layer_types(filled, filled.optional_length("sliding_window"), kinds),
        attention_bias=fields.flag("attention_bias", True),
        num_experts=fields.count("num_local_experts", 128),
        top_k=fields.integer("num_experts_per_tok", 4),
        swiglu=SwiGLUBounds(
            fields.factor("swiglu_limit", 7.0), fields.factor("swiglu_alpha", 1.702)
        ),
    )


def write(config: GptOssConfig) -> dict[str, Any]:
    """Return the fields of `config.json` that describe a config."""
    return write_decoder(
        "GptOss",
        config,
        model_type="gpt_oss",
        sliding_window=config.window,
        layer_types=write_layer_types(config),
        attention_bias=config.attention_bias,
        num_local_experts=config.num_experts,
        num_experts_per_tok=config.top_k,
        swiglu_limit=config.swiglu.limit,
        swiglu_alpha=config.swiglu.alpha,
    )
