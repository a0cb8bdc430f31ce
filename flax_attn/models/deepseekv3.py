"""DeepSeek-V3."""

from dataclasses import replace
from typing import Any

from attn_spec.models.deepseekv3 import DeepseekV3Config, read, write
from flax_attn.convert.rules import Layout, Rule
from flax_attn.models.decoder import Decoder
from flax_attn.models.hugging_face.experts import fused, one_by_one
from flax_attn.models.hugging_face.family import Family, linears, norms
from flax_attn.modules.experts import Experts
from flax_attn.modules.feed_forward import GatedFeedForward
from flax_attn.modules.latent_attention import MultiHeadLatentAttention
from flax_attn.modules.mixture import MixtureOfExperts
from flax_attn.modules.norm import RMSNorm
from flax_attn.modules.router import Router


def _without_61(layout: Layout) -> Layout:
    """Ignore the layer that predicts more than the next token, as transformers does."""
    return replace(layout, ignored=rf"{layout.ignored}|(.*\.)?layers\.61\..*")


_BLOCK = "trf_blocks.{i}"
_LAYER = "model.layers.{i}"
_ATTENTION = {
    "W_query_down": "q_a_proj",
    "W_query_up": "q_b_proj",
    "W_latent": "kv_a_proj_with_mqa",
    "W_key_value": "kv_b_proj",
}
_NORMS = {"q_norm": "q_a_layernorm", "kv_norm": "kv_a_layernorm"}
_SHARED = {"W_gate": "gate_proj", "W_up": "up_proj", "W_down": "down_proj"}
_OTHERS = (
    *linears(_ATTENTION, f"{_BLOCK}.att.", f"{_LAYER}.self_attn."),
    *linears(_SHARED, f"{_BLOCK}.ff.shared.", f"{_LAYER}.mlp.shared_experts."),
    *norms(_NORMS, f"{_BLOCK}.att.", f"{_LAYER}.self_attn."),
    Rule((f"{_BLOCK}.ff.router.selection_bias",), f"{_LAYER}.mlp.gate.e_score_correction_bias"),
)


class DeepseekV3(Decoder[DeepseekV3Config]):
    """DeepSeek-V3: latent attention, and mixtures of experts in groups beside a shared one.

    Arguments and errors are those of `LanguageModel`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = DeepseekV3Config(
        ...     8, 12, num_heads=4, num_layers=2, context_length=16, vocab_size=11,
        ...     num_experts=8, top_k=2, d_expert=6, kv_lora_rank=5, q_lora_rank=7,
        ...     qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=3)
        >>> DeepseekV3(config, rngs=nnx.Rngs(0))(jnp.ones((3, 5), int)).shape
        (3, 5, 11)

    References:
        DeepSeek-AI 2024 (arXiv:2412.19437).
    """

    family = Family(
        {"deepseek_v3": read},
        write,
        _without_61(one_by_one(f"{_LAYER}.mlp", others=_OTHERS)),
        (_without_61(fused(f"{_LAYER}.mlp", *_OTHERS)),),
    )

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
