"""Qwen3, its mixtures of experts."""

from dataclasses import dataclass
from typing import Any

from flax_attn.models.hugging_face.decoder import write_decoder, write_window
from flax_attn.models.hugging_face.experts import fused, one_by_one, read_mixture, write_mixture
from flax_attn.models.hugging_face.family import Family
from flax_attn.models.hugging_face.fields import Fields
from flax_attn.models.qwen3 import Qwen3, Qwen3Config
from flax_attn.modules.experts import Experts
from flax_attn.modules.feed_forward import GatedFeedForward
from flax_attn.modules.mixture import MixtureOfExperts
from flax_attn.modules.router import Router


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


def _read(fields: Fields, dropout: float | None) -> Qwen3MoeConfig:
    fields = fields.under_one_name(num_local_experts="num_experts")
    used = fields.flag("use_sliding_window", False)
    window = fields.optional_length("sliding_window", 4096) if used else None
    return Qwen3MoeConfig(**read_mixture(fields, dropout), window=window)


def _write(config: Qwen3MoeConfig) -> dict[str, Any]:
    return write_decoder(
        "Qwen3Moe",
        config,
        model_type="qwen3_moe",
        use_sliding_window=config.window is not None,
        sliding_window=write_window("Qwen3Moe", config),
        **write_mixture(config),
    )


class Qwen3Moe(Qwen3):
    """Qwen3 with mixtures of experts: a `Qwen3` in all but its feed-forward layers.

    The arguments are those of `LanguageModel`.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = Qwen3MoeConfig(8, 12, num_heads=4, num_layers=2, context_length=16,
        ...                         vocab_size=11, num_experts=4, top_k=2, d_expert=6)
        >>> Qwen3Moe(config, rngs=nnx.Rngs(0))(jnp.ones((3, 5), int)).shape
        (3, 5, 11)

    References:
        Qwen Team 2025 (arXiv:2505.09388).
    """

    family = Family(
        {"qwen3_moe": _read},
        _write,
        one_by_one("model.layers.{i}.mlp"),
        (fused("model.layers.{i}.mlp"),),
    )
    config: Qwen3MoeConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def feed_forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, layer: int, **options: Any
    ) -> GatedFeedForward | MixtureOfExperts:
        """Return the mixture of a layer, or its SwiGLU layer where it has none."""
        config = self.config
        if layer in config.dense_layers:
            return super().feed_forward(layer, **options)
        router = Router(
            config.d_model,
            config.num_experts,
            config.top_k,
            renormalize=config.renormalize,
            **options,
        )
        experts = Experts(
            config.num_experts, config.d_model, config.d_expert, config.activation, **options
        )
        return MixtureOfExperts(router, experts)
