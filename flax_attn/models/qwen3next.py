"""Qwen3-Next: three layers of Gated DeltaNet, then one of gated softmax attention.

Each layer has a mixture of experts.
"""

from typing import Any

from attn_spec.models.qwen3next import Qwen3NextConfig, read, write
from flax_attn.convert.rules import Layout
from flax_attn.models.hugging_face.delta_net import delta_net, gated_queries
from flax_attn.models.hugging_face.experts import fused, one_by_one
from flax_attn.models.hugging_face.family import Family, linears
from flax_attn.models.qwen3moe import Qwen3Moe
from flax_attn.modules.calls import Attention
from flax_attn.modules.feed_forward import GatedFeedForward
from flax_attn.modules.gated_delta_net import GatedDeltaNet
from flax_attn.modules.linear import Linear
from flax_attn.modules.mixture import MixtureOfExperts
from flax_attn.modules.norm import RMSNorm

_SHARED = {"W_gate": "gate_proj", "W_up": "up_proj", "W_down": "down_proj"}
_LAYER = "model.layers.{i}"
_SHARED_EXPERT = "trf_blocks.{i}.ff.shared"
_OTHERS = (
    *delta_net(f"{_LAYER}.linear_attn"),
    *gated_queries(f"{_LAYER}.self_attn.q_proj"),
    *linears({f"{_SHARED_EXPERT}_gate": f"{_LAYER}.mlp.shared_expert_gate"}),
    *linears(_SHARED, f"{_SHARED_EXPERT}.", f"{_LAYER}.mlp.shared_expert."),
)


def _layout(experts: Layout) -> Layout:
    # Heads that predict further tokens are left out, as transformers does.
    return Layout((*_OTHERS, *experts.rules), ignored=rf"{experts.ignored}|(.*\.)?mtp\..*")


class Qwen3Next(Qwen3Moe):
    """Qwen3-Next: Gated DeltaNet in most layers, gated softmax attention in some.

    The mixtures of experts have a shared expert. Norms have the factor `1 + scale`, except those
    within a DeltaNet. Arguments and errors are those of `LanguageModel`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = Qwen3NextConfig(
        ...     8, 12, num_heads=4, num_layers=2, full_layers=(1,), context_length=16,
        ...     vocab_size=11, num_experts=4, top_k=2, linear_heads=4, linear_key_heads=2)
        >>> Qwen3Next(config, rngs=nnx.Rngs(0))(jnp.ones((3, 5), int)).shape
        (3, 5, 11)

    References:
        Qwen Team 2025 (arXiv:2505.09388); Yang et al. 2024, Gated DeltaNet (arXiv:2412.06464); Qiu
        et al. 2025, the gate of the heads (arXiv:2505.06708).
    """

    family = Family(
        {"qwen3_next": read},
        write,
        _layout(one_by_one(f"{_LAYER}.mlp")),
        (_layout(fused(f"{_LAYER}.mlp")),),
    )
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
            **{
                name: value
                for name, value in options.items()
                if name not in ("backend", "q_norm", "k_norm")
            },
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
