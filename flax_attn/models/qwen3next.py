"""Qwen3-Next: three layers of Gated DeltaNet, then one of gated softmax attention.

Each layer has a mixture of experts.
"""

from dataclasses import dataclass
from typing import Any

from flax_attn.convert.rules import Layout
from flax_attn.models.hugging_face.decoder import FULL, write_decoder
from flax_attn.models.hugging_face.delta_net import delta_net, gated_queries
from flax_attn.models.hugging_face.experts import fused, one_by_one, read_mixture, write_mixture
from flax_attn.models.hugging_face.family import Family, linears
from flax_attn.models.hugging_face.fields import Fields
from flax_attn.models.qwen3moe import Qwen3Moe, Qwen3MoeConfig
from flax_attn.modules.calls import Attention
from flax_attn.modules.feed_forward import GatedFeedForward
from flax_attn.modules.gated_delta_net import GatedDeltaNet
from flax_attn.modules.linear import Linear
from flax_attn.modules.mixture import MixtureOfExperts
from flax_attn.modules.norm import RMSNorm


@dataclass(frozen=True)
class Qwen3NextConfig(Qwen3MoeConfig):
    """The sizes of a Qwen3-Next: those of a `Qwen3MoeConfig`, its DeltaNets and shared experts.

    `full_layers` are the layers with softmax attention; the others have a `GatedDeltaNet`.

    Args:
        linear_heads: number of value heads of a DeltaNet.
        linear_key_heads: number of key heads of a DeltaNet.
        linear_head_dim: width of its query and key heads.
        linear_value_dim: width of its value heads.
        kernel_size: kernel size of the convolutions of a DeltaNet.
        d_shared: width inside the shared expert.

    Example:
        >>> Qwen3NextConfig(2048, 5632, 16, 8, num_kv_heads=2, full_layers=(3, 7)).top_k
        10
    """

    head_dim: int | None = 256
    num_experts: int = 512
    top_k: int = 10
    d_expert: int = 512
    linear_heads: int = 32
    linear_key_heads: int = 16
    linear_head_dim: int = 128
    linear_value_dim: int = 128
    kernel_size: int = 4
    d_shared: int = 512


_LINEAR = "linear_attention"
_SIZES = {  # our names, theirs, and what transformers takes where they are missing
    "linear_heads": ("linear_num_value_heads", 32),
    "linear_key_heads": ("linear_num_key_heads", 16),
    "linear_head_dim": ("linear_key_head_dim", 128),
    "linear_value_dim": ("linear_value_head_dim", 128),
    "kernel_size": ("linear_conv_kernel_dim", 4),
    "d_shared": ("shared_expert_intermediate_size", 512),
}


def _read(fields: Fields, dropout: float | None) -> Qwen3NextConfig:
    fields.only(hidden_act="silu")  # of the convolutions too
    sizes: dict[str, Any] = {
        ours: fields.integer(theirs, default) for ours, (theirs, default) in _SIZES.items()
    }
    defaults = {
        "head_dim": 256,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "norm_topk_prob": True,
    }
    defaults |= {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
    return Qwen3NextConfig(
        **read_mixture(fields.filled(**defaults), dropout, partial_rope=True),
        full_layers=_read_layer_types(fields),
        **sizes,
    )


def _read_layer_types(fields: Fields) -> tuple[int, ...]:
    layers, interval = (
        fields.count("num_hidden_layers"),
        fields.length("full_attention_interval", 4),
    )
    kinds = fields.optional_texts("layer_types") or [
        _LINEAR if (i + 1) % interval else FULL for i in range(layers)
    ]
    if len(kinds) != layers or not set(kinds) <= {_LINEAR, FULL}:
        raise ValueError(
            f"{fields.where}: layer_types must name {_LINEAR!r} or {FULL!r} for each of"
            f" num_hidden_layers={layers} layers; got {kinds}"
        )
    return tuple(i for i, kind in enumerate(kinds) if kind == FULL)


def _write(config: Qwen3NextConfig) -> dict[str, Any]:
    sizes = {theirs: getattr(config, ours) for ours, (theirs, _) in _SIZES.items()}
    kinds = [FULL if layer in config.full_layers else _LINEAR for layer in range(config.num_layers)]
    fields = write_mixture(config) | sizes | {"layer_types": kinds, "model_type": "qwen3_next"}
    return write_decoder("Qwen3Next", config, partial_rope=True, **fields)


def _layout(experts: Layout) -> Layout:
    layer, shared = "model.layers.{i}", "trf_blocks.{i}.ff.shared"
    rules = (
        *delta_net(f"{layer}.linear_attn"),
        *gated_queries(f"{layer}.self_attn.q_proj"),
        *linears({f"{shared}_gate": f"{layer}.mlp.shared_expert_gate"}),
        *linears(
            {
                f"{shared}.W_{name}": f"{layer}.mlp.shared_expert.{name}_proj"
                for name in ("gate", "up", "down")
            }
        ),
    )
    # Heads that predict further tokens are left out, as transformers does.
    return Layout((*rules, *experts.rules), ignored=rf"{experts.ignored}|(.*\.)?mtp\..*")


class Qwen3Next(Qwen3Moe):
    """Qwen3-Next: Gated DeltaNet in most layers, gated softmax attention in some.

    The mixtures of experts have a shared expert. Norms have the factor `1 + scale`, except those
    within a DeltaNet. The arguments are those of `LanguageModel`.

    Raises:
        ValueError: where its layers do.

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

    _MIXTURE = "model.layers.{i}.mlp"
    family = Family(
        {"qwen3_next": _read}, _write, _layout(one_by_one(_MIXTURE)), (_layout(fused(_MIXTURE)),)
    )
    config: Qwen3NextConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def attention(self, layer: int, **options: Any) -> Attention:  # pyright: ignore[reportIncompatibleMethodOverride]
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
        mixture, config = super().feed_forward(layer, **options), self.config
        if not isinstance(mixture, MixtureOfExperts):
            return mixture
        shared = GatedFeedForward(config.d_model, config.d_shared, config.activation, **options)
        return MixtureOfExperts(
            mixture.router, mixture.experts, shared, Linear(config.d_model, 1, False, **options)
        )

    def norm(self, width: int | None = None, **options: Any) -> RMSNorm:
        """Return a norm whose factor is `1 + scale`."""
        return super().norm(width, zero_centred=True, **options)
