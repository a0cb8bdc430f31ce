"""Mixtral."""

from dataclasses import dataclass
from typing import Any

from flax_attn.models.decoder import Decoder, DecoderConfig
from flax_attn.models.hugging_face.decoder import read_decoder, write_decoder, write_window
from flax_attn.models.hugging_face.experts import fused, one_by_one
from flax_attn.models.hugging_face.family import Family
from flax_attn.models.hugging_face.fields import Fields
from flax_attn.modules.experts import Experts
from flax_attn.modules.mixture import MixtureOfExperts
from flax_attn.modules.router import Router


@dataclass(frozen=True)
class MixtralConfig(DecoderConfig):
    """The sizes of a Mixtral: those of a `DecoderConfig`, and of the mixture.

    `d_hidden` is the width inside an expert.

    Args:
        num_experts: number of experts in each layer.
        top_k: number of experts for each token.

    Example:
        >>> MixtralConfig(4096, 14336, num_heads=32, num_layers=32, num_kv_heads=8).num_experts
        8
    """

    eps: float = 1e-5
    num_experts: int = 8
    top_k: int = 2


def _read(fields: Fields, dropout: float | None) -> MixtralConfig:
    fields = fields.under_one_name(num_experts="num_local_experts")
    fields.only(router_jitter_noise=0.0)
    filled = fields.filled(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6)
    return MixtralConfig(
        **read_decoder(filled, dropout),
        window=fields.optional_length("sliding_window"),
        num_experts=fields.count("num_local_experts", 8),
        top_k=fields.integer("num_experts_per_tok", 2),
    )


def _write(config: MixtralConfig) -> dict[str, Any]:
    return write_decoder(
        "Mixtral",
        config,
        sliding_window=write_window("Mixtral", config),
        num_local_experts=config.num_experts,
        num_experts_per_tok=config.top_k,
    )


class Mixtral(Decoder[MixtralConfig]):
    """Mixtral: a Llama whose feed-forward layers are mixtures of SwiGLU experts.

    The arguments are those of `LanguageModel`.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = MixtralConfig(8, 12, 4, 2, context_length=16, vocab_size=11, num_experts=4)
        >>> Mixtral(config, rngs=nnx.Rngs(0))(jnp.ones((3, 5), int)).shape
        (3, 5, 11)

    References:
        Jiang et al. 2024 (arXiv:2401.04088).
    """

    family = Family(
        {"mixtral": _read},
        _write,
        one_by_one("model.layers.{i}.block_sparse_moe", "w1", "w3", "w2"),
        (fused("model.layers.{i}.mlp"),),
    )

    def feed_forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, layer: int, **options: Any
    ) -> MixtureOfExperts:
        """Return the mixture of a layer."""
        config = self.config
        return MixtureOfExperts(
            Router(config.d_model, config.num_experts, config.top_k, **options),
            Experts(
                config.num_experts, config.d_model, config.d_hidden, config.activation, **options
            ),
        )
