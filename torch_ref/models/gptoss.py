"""gpt-oss."""

from typing import Any

from attn_spec.models.gptoss import GptOssConfig
from attn_spec.scores import Scores
from torch_ref.models.decoder import Decoder
from torch_ref.modules.experts import ClampedSwiGLU, Experts
from torch_ref.modules.mixture import MixtureOfExperts
from torch_ref.modules.multi_head import MultiHeadAttention
from torch_ref.modules.router import Router


class GptOss(Decoder[GptOssConfig]):
    """gpt-oss: attention sinks, windows and full layers in turn, and mixtures of experts.

    The experts have a clamped SwiGLU. Arguments and errors are those of `LanguageModel`.

    Example:
        >>> import torch
        >>> config = GptOssConfig(8, 12, num_heads=4, num_layers=2, context_length=16,
        ...                       vocab_size=11, num_experts=4, top_k=2)
        >>> GptOss(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])
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
        # Router and experts have biases, which no other family here has.
        return MixtureOfExperts(
            Router(config.d_model, config.num_experts, config.top_k, bias=True, **options),
            Experts(
                config.num_experts,
                config.d_model,
                config.d_hidden,
                ClampedSwiGLU.of(config.swiglu),
                bias=True,
                **options,
            ),
        )
