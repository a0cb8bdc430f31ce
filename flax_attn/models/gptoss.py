"""gpt-oss."""

from dataclasses import dataclass, field
from typing import Any

from flax_attn.convert.rules import Rule
from flax_attn.functional.scores import Scores
from flax_attn.models.decoder import Decoder, DecoderConfig
from flax_attn.models.hugging_face.decoder import (
    FULL,
    SLIDING,
    read_decoder,
    read_layer_types,
    write_decoder,
    write_layer_types,
)
from flax_attn.models.hugging_face.experts import interleaved
from flax_attn.models.hugging_face.family import Family
from flax_attn.models.hugging_face.fields import Fields
from flax_attn.modules.experts import ClampedSwiGLU, Experts
from flax_attn.modules.mixture import MixtureOfExperts
from flax_attn.modules.multi_head import MultiHeadAttention
from flax_attn.modules.router import Router


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
    swiglu: ClampedSwiGLU = field(default_factory=ClampedSwiGLU)


_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read(fields: Fields, dropout: float | None) -> GptOssConfig:
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
    kinds = [FULL if layer % 2 else SLIDING for layer in layers]
    return GptOssConfig(
        **read_decoder(filled, dropout),
        **read_layer_types(filled, filled.optional_length("sliding_window"), kinds),
        attention_bias=fields.flag("attention_bias", True),
        num_experts=fields.count("num_local_experts", 128),
        top_k=fields.integer("num_experts_per_tok", 4),
        swiglu=ClampedSwiGLU(
            fields.factor("swiglu_limit", 7.0), fields.factor("swiglu_alpha", 1.702)
        ),
    )


def _write(config: GptOssConfig) -> dict[str, Any]:
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


class GptOss(Decoder[GptOssConfig]):
    """gpt-oss: attention sinks, windows and full layers in turn, and mixtures of experts.

    The experts have a clamped SwiGLU. The arguments are those of `LanguageModel`.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = GptOssConfig(8, 12, num_heads=4, num_layers=2, context_length=16,
        ...                       vocab_size=11, num_experts=4, top_k=2)
        >>> GptOss(config, rngs=nnx.Rngs(0))(jnp.ones((3, 5), int)).shape
        (3, 5, 11)

    References:
        OpenAI 2025 (arXiv:2508.10925).
    """

    family = Family(
        {"gpt_oss": _read},
        _write,
        interleaved(
            "model.layers.{i}.mlp",
            Rule(("trf_blocks.{i}.att.sinks",), "model.layers.{i}.self_attn.sinks"),
        ),
    )

    def attention(self, layer: int, **options: Any) -> MultiHeadAttention:
        """Return the attention of a layer, with a sink for each head."""
        bias = self.config.attention_bias
        return super().attention(
            layer, qkv_bias=bias, out_bias=bias, scores=Scores(sinks=True), **options
        )

    def feed_forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, layer: int, **options: Any
    ) -> MixtureOfExperts:
        """Return the mixture of a layer."""
        config = self.config
        return MixtureOfExperts(
            Router(config.d_model, config.num_experts, config.top_k, bias=True, **options),
            Experts(
                config.num_experts,
                config.d_model,
                config.d_hidden,
                config.swiglu,
                bias=True,
                **options,
            ),
        )
