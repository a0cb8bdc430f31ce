"""gpt-oss."""

from dataclasses import dataclass, field
from typing import Any

from torch_ref.functional.scores import Scores
from torch_ref.models.decoder import Decoder, DecoderConfig
from torch_ref.modules.experts import ClampedSwiGLU, Experts
from torch_ref.modules.mixture import MixtureOfExperts
from torch_ref.modules.multi_head import MultiHeadAttention
from torch_ref.modules.router import Router


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


class GptOss(Decoder[GptOssConfig]):
    """gpt-oss: attention sinks, windows and full layers in turn, and mixtures of experts.

    The experts have a clamped SwiGLU. The arguments are those of `LanguageModel`.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> import torch
        >>> config = GptOssConfig(8, 12, num_heads=4, num_layers=2, context_length=16,
        ...                       vocab_size=11, num_experts=4, top_k=2)
        >>> GptOss(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])

    References:
        OpenAI 2025 (arXiv:2508.10925).
    """

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
