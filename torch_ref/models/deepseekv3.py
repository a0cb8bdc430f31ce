"""DeepSeek-V3."""

from typing import Any

from attn_spec.models.deepseekv3 import DeepseekV3Config
from torch_ref.models.decoder import Decoder
from torch_ref.modules.experts import Experts
from torch_ref.modules.feed_forward import GatedFeedForward
from torch_ref.modules.latent_attention import MultiHeadLatentAttention
from torch_ref.modules.mixture import MixtureOfExperts
from torch_ref.modules.norm import RMSNorm
from torch_ref.modules.router import Router


class DeepseekV3(Decoder[DeepseekV3Config]):
    """DeepSeek-V3: latent attention, and mixtures of experts in groups beside a shared one.

    Arguments and errors are those of `LanguageModel`.

    Example:
        >>> import torch
        >>> config = DeepseekV3Config(
        ...     8, 12, num_heads=4, num_layers=2, context_length=16, vocab_size=11,
        ...     num_experts=8, top_k=2, d_expert=6, kv_lora_rank=5, q_lora_rank=7,
        ...     qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=3)
        >>> DeepseekV3(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])
    """

    def attention(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, layer: int, **options: Any
    ) -> MultiHeadLatentAttention:
        """Return the latent attention; `options` are arguments of `MultiHeadLatentAttention`."""
        return MultiHeadLatentAttention(
            **self.config.latent_attention,
            window=self.window(layer),
            rope=self.rope(layer),
            **options,
        )

    def head_norms(self, **numerics: Any) -> dict[str, Any]:
        """Return the norms of the latents; their epsilon is fixed, as in DeepSeek-V3."""
        # Where a query has no latent there is no norm of one.
        ranks = self.config.latent_ranks
        return {name: RMSNorm(rank, 1e-6, **numerics) for name, rank in ranks.items()}

    def feed_forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, layer: int, **options: Any
    ) -> GatedFeedForward | MixtureOfExperts:
        """Return the mixture of a layer, or its SwiGLU layer where it has none."""
        config = self.config
        if layer < config.num_dense_layers:
            return super().feed_forward(layer, **options)
        router = Router(**config.router, **options)
        experts = Experts(
            config.num_experts, config.d_model, config.d_expert, config.activation, **options
        )
        # All shared experts are one layer, as wide as they are together.
        shared = GatedFeedForward(
            config.d_model, config.num_shared * config.d_expert, config.activation, **options
        )
        return MixtureOfExperts(router, experts, shared)
