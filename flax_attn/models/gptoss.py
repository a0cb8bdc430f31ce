"""gpt-oss."""

from typing import Any

from attn_spec.models.gptoss import GptOssConfig, read, write
from attn_spec.scores import Scores
from flax_attn.convert.rules import Rule
from flax_attn.models.decoder import Decoder
from flax_attn.models.hugging_face.experts import interleaved
from flax_attn.models.hugging_face.family import Family
from flax_attn.modules.experts import ClampedSwiGLU, Experts
from flax_attn.modules.mixture import MixtureOfExperts
from flax_attn.modules.multi_head import MultiHeadAttention
from flax_attn.modules.router import Router


class GptOss(Decoder[GptOssConfig]):
    """gpt-oss: attention sinks, windows and full layers in turn, and mixtures of experts.

    The experts have a clamped SwiGLU. Arguments and errors are those of `LanguageModel`.

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
        {"gpt_oss": read},
        write,
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
