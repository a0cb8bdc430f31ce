"""Qwen3-Next: three layers of Gated DeltaNet, then one of gated softmax attention.

Each layer has a mixture of experts.
"""

from typing import Any

from attn_spec.models.qwen3next import Qwen3NextConfig
from torch_ref.models.qwen3moe import Qwen3Moe
from torch_ref.modules.calls import Attention
from torch_ref.modules.feed_forward import GatedFeedForward
from torch_ref.modules.gated_delta_net import GatedDeltaNet
from torch_ref.modules.linear import Linear
from torch_ref.modules.mixture import MixtureOfExperts
from torch_ref.modules.norm import RMSNorm


class Qwen3Next(Qwen3Moe):
    """Qwen3-Next: Gated DeltaNet in most layers, gated softmax attention in some.

    The mixtures of experts have a shared expert. Norms have the factor `1 + scale`, except those
    within a DeltaNet. Arguments and errors are those of `LanguageModel`.

    Example:
        >>> import torch
        >>> config = Qwen3NextConfig(
        ...     8, 12, num_heads=4, num_layers=2, full_layers=(1,), context_length=16,
        ...     vocab_size=11, num_experts=4, top_k=2, linear_heads=4, linear_key_heads=2)
        >>> Qwen3Next(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])
    """

    config: Qwen3NextConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def attention(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, layer: int, **options: Any
    ) -> Attention:
        """Return the attention of a layer, gated, or its `GatedDeltaNet`."""
        config = self.config
        if layer in config.full_layers:
            return super().attention(layer, output_gate="features", **options)
        return GatedDeltaNet(
            config.d_model,
            config.d_model,
            config.linear_heads,
            config.linear_head_dim,
            num_key_heads=config.linear_key_heads,
            value_dim=config.linear_value_dim,
            kernel_size=config.kernel_size,
            eps=config.eps,
        )

    def feed_forward(self, layer: int, **options: Any) -> GatedFeedForward | MixtureOfExperts:
        """Return the mixture of a layer, with its shared expert, or the SwiGLU of a dense layer."""
        mixture = super().feed_forward(layer, **options)
        if not isinstance(mixture, MixtureOfExperts):
            return mixture
        # One more expert, which computes every token, behind a gate of its own.
        config = self.config
        d = config.d_model
        shared = GatedFeedForward(d, config.d_shared, config.activation, **options)
        gate = Linear(d, 1, False, **options)
        return MixtureOfExperts(mixture.router, mixture.experts, shared, gate)

    def norm(self, width: int | None = None, **options: Any) -> RMSNorm:
        """Return a norm whose factor is `1 + scale`."""
        return super().norm(width, zero_centred=True, **options)
