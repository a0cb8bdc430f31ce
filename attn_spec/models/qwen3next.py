"""Qwen3-Next: three layers of Gated DeltaNet, then one of gated softmax attention.

Each layer has a mixture of experts.
"""

from dataclasses import dataclass
from typing import Any

from attn_spec.hugging_face.fields import Fields
from attn_spec.models.decoder import FULL, write_decoder
from attn_spec.models.qwen3moe import Qwen3MoeConfig, read_mixture, write_mixture


@dataclass(frozen=True)
class Qwen3NextConfig(Qwen3MoeConfig):
    """The sizes of a Qwen3-Next: those of a `Qwen3MoeConfig`, its DeltaNets and shared experts.

    `full_layers` are the layers with softmax attention; the others have a `GatedDeltaNet`.

    Args:
        linear_heads: number of value heads of a DeltaNet.
        linear_key_heads: number of key heads of a DeltaNet.
        linear_head_dim: width of its query and key heads.
        linear_value_dim: width of its value heads.
        kernel_size: kernel size of the convolutions of a DeltaNet.
        d_shared: width inside the shared expert.

    Example:
        >>> Qwen3NextConfig(2048, 5632, 16, 8, num_kv_heads=2, full_layers=(3, 7)).top_k
        10
    """

    head_dim: int | None = 256
    num_experts: int = 512
    top_k: int = 10
    d_expert: int = 512
    linear_heads: int = 32
    linear_key_heads: int = 16
    linear_head_dim: int = 128
    linear_value_dim: int = 128
    kernel_size: int = 4
    d_shared: int = 512


_LINEAR = "linear_attention"
# Our names, theirs, and what transformers takes where they are missing.
_SIZES = {
    "linear_heads": ("linear_num_value_heads", 32),
    "linear_key_heads": ("linear_num_key_heads", 16),
    "linear_head_dim": ("linear_key_head_dim", 128),
    "linear_value_dim": ("linear_value_head_dim", 128),
    "kernel_size": ("linear_conv_kernel_dim", 4),
    "d_shared": ("shared_expert_intermediate_size", 512),
}


def read(fields: Fields, dropout: float | None) -> Qwen3NextConfig:
    """Return the config that the fields of a `config.json` describe."""
    # Of the convolutions too.
    fields.only(hidden_act="silu")
    sizes: dict[str, Any] = {
        ours: fields.integer(theirs, default) for ours, (theirs, default) in _SIZES.items()
    }
    defaults = {
        "head_dim": 256,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "norm_topk_prob": True,
    }
    # Those of transformers, where a file lacks a field of the mixtures.
    defaults |= {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
    return Qwen3NextConfig(
        **read_mixture(fields.filled(**defaults), dropout, partial_rope=True),
        full_layers=_read_layer_types(fields),
        **sizes,
    )


def _read_layer_types(fields: Fields) -> tuple[int, ...]:
    # Files of older versions have an interval in place of `layer_types`.
    layers, interval = (
        fields.count("num_hidden_layers"),
        fields.length("full_attention_interval", 4),
    )
    kinds = fields.optional_texts("layer_types") or [
        _LINEAR if (i + 1) % interval else FULL for i in range(layers)
    ]
    if len(kinds) != layers or not set(kinds) <= {_LINEAR, FULL}:
        raise ValueError(
            f"{fields.where}: layer_types must name {_LINEAR!r} or {FULL!r} for each of"
            f" num_hidden_layers={layers} layers; got {kinds}"
        )
    return tuple(i for i, kind in enumerate(kinds) if kind == FULL)


def write(config: Qwen3NextConfig) -> dict[str, Any]:
    """Return the fields of `config.json` that describe a config."""
    sizes = {theirs: getattr(config, ours) for ours, (theirs, _) in _SIZES.items()}
    kinds = [FULL if layer in config.full_layers else _LINEAR for layer in range(config.num_layers)]
    fields = write_mixture(config) | sizes | {"layer_types": kinds, "model_type": "qwen3_next"}
    return write_decoder("Qwen3Next", config, partial_rope=True, **fields)
