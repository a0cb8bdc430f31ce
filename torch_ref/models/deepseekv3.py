"""DeepSeek-V3."""

import math
from dataclasses import dataclass, field
from typing import Any

from attn_spec.frequencies import YaRNScaling
from torch_ref.functional.positions import RoPE
from torch_ref.functional.scores import Scores
from torch_ref.models.decoder import Decoder, DecoderConfig
from torch_ref.modules.experts import Experts
from torch_ref.modules.feed_forward import GatedFeedForward
from torch_ref.modules.latent_attention import MultiHeadLatentAttention
from torch_ref.modules.mixture import MixtureOfExperts
from torch_ref.modules.norm import RMSNorm
from torch_ref.modules.router import Router


@dataclass(frozen=True)
class DeepseekV3Config(DecoderConfig):
    """The sizes of a DeepSeek-V3: those of a `DecoderConfig`, its latent attention and mixtures.

    Args:
        kv_lora_rank: width of the latent of keys and values.
        q_lora_rank: width of the latent of queries; None is no latent.
        qk_nope_head_dim: width of the part of a head that is not rotated.
        qk_rope_head_dim: width of the part of a head that is rotated.
        v_head_dim: width of a value.
        attention_bias: whether the projections down to latents, and that to the output, have a
            bias.
        num_experts: number of experts in each mixture, without the shared ones.
        top_k: number of experts for each token.
        d_expert: width inside an expert; `d_hidden` is that of the layers without a mixture.
        num_shared: width of the shared expert, in multiples of `d_expert`.
        groups: number of groups of experts.
        top_groups: number of groups that a token's experts are chosen from.
        renormalize: whether the weights of a token's experts are divided by their sum.
        routed_scale: factor on the weights of a token's experts.
        num_dense_layers: number of first layers without a mixture.

    Example:
        >>> config = DeepseekV3Config(7168, 18432, num_heads=128, num_layers=61)
        >>> config.num_experts, config.kv_lora_rank
        (256, 512)
    """

    context_length: int = 4096
    vocab_size: int = 129280
    rope: RoPE = field(default_factory=lambda: RoPE(interleaved=True))
    kv_lora_rank: int = 512
    q_lora_rank: int | None = 1536
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    attention_bias: bool = False
    num_experts: int = 256
    top_k: int = 8
    d_expert: int = 2048
    num_shared: int = 1
    groups: int = 8
    top_groups: int = 4
    renormalize: bool = True
    routed_scale: float = 2.5
    num_dense_layers: int = 3

    @property
    def scale(self) -> float:
        """The factor on the scores.

        It is `1 / sqrt(h)`, times the square of `1 + mscale_all_dim ln(factor) / 10` of YaRN.
        """
        yarn, scale = self.rope.scaling, (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        if not isinstance(yarn, YaRNScaling):
            return scale
        return scale * (1 + yarn.mscale_all_dim * math.log(yarn.factor) / 10) ** 2


class DeepseekV3(Decoder[DeepseekV3Config]):
    """DeepSeek-V3: latent attention, and mixtures of experts in groups beside a shared one.

    The arguments are those of `LanguageModel`.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> import torch
        >>> config = DeepseekV3Config(
        ...     8, 12, num_heads=4, num_layers=2, context_length=16, vocab_size=11,
        ...     num_experts=8, top_k=2, d_expert=6, kv_lora_rank=5, q_lora_rank=7,
        ...     qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=3)
        >>> DeepseekV3(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])

    References:
        DeepSeek-AI 2024 (arXiv:2412.19437).
    """

    def attention(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, layer: int, **options: Any
    ) -> MultiHeadLatentAttention:
        """Return the latent attention; `options` are arguments of `MultiHeadLatentAttention`."""
        config = self.config
        return MultiHeadLatentAttention(
            config.d_model,
            config.d_model,
            config.context_length,
            config.dropout,
            config.num_heads,
            config.attention_bias,
            kv_lora_rank=config.kv_lora_rank,
            q_lora_rank=config.q_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            out_bias=config.attention_bias,
            window=self.window(layer),
            rope=self.rope(layer),
            scores=Scores(scale=config.scale),
            **options,
        )

    def head_norms(self, **numerics: Any) -> dict[str, Any]:
        """Return the norms of the latents; their epsilon is fixed, as in DeepSeek-V3."""
        ranks = {"q_norm": self.config.q_lora_rank, "kv_norm": self.config.kv_lora_rank}
        return {
            name: RMSNorm(rank, 1e-6, **numerics)
            for name, rank in ranks.items()
            if rank is not None
        }

    def feed_forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, layer: int, **options: Any
    ) -> GatedFeedForward | MixtureOfExperts:
        """Return the mixture of a layer, or its SwiGLU layer where it has none."""
        config = self.config
        if layer < config.num_dense_layers:
            return super().feed_forward(layer, **options)
        router = Router(
            config.d_model,
            config.num_experts,
            config.top_k,
            "sigmoid",
            renormalize=config.renormalize,
            scale=config.routed_scale,
            selection_bias=True,
            groups=config.groups,
            top_groups=config.top_groups,
            **options,
        )
        experts = Experts(
            config.num_experts, config.d_model, config.d_expert, config.activation, **options
        )
        shared = GatedFeedForward(
            config.d_model, config.num_shared * config.d_expert, config.activation, **options
        )
        return MixtureOfExperts(router, experts, shared)
