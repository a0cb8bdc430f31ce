"""Qwen3, its mixtures of experts."""

from typing import Any

from attn_spec.models.qwen3moe import Qwen3MoeConfig
from torch_ref.models.qwen3 import Qwen3
from torch_ref.modules.experts import Experts
from torch_ref.modules.feed_forward import GatedFeedForward
from torch_ref.modules.mixture import MixtureOfExperts
from torch_ref.modules.router import Router


class Qwen3Moe(Qwen3):
    """Qwen3 with mixtures of experts: a `Qwen3` in all but its feed-forward layers.

    Arguments and errors are those of `LanguageModel`.

    Example:
        >>> import torch
        >>> config = Qwen3MoeConfig(8, 12, num_heads=4, num_layers=2, context_length=16,
        ...                         vocab_size=11, num_experts=4, top_k=2, d_expert=6)
        >>> Qwen3Moe(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])
    """

    config: Qwen3MoeConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def feed_forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, layer: int, **options: Any
    ) -> GatedFeedForward | MixtureOfExperts:
        """Return the mixture of a layer, or its SwiGLU layer where it has none."""
        config = self.config
        # Listed in the config, by number or as every n-th layer.
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
