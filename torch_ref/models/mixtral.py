"""Mixtral."""

from dataclasses import dataclass
from typing import Any

from torch_ref.models.decoder import Decoder, DecoderConfig
from torch_ref.modules.experts import Experts
from torch_ref.modules.mixture import MixtureOfExperts
from torch_ref.modules.router import Router


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


class Mixtral(Decoder[MixtralConfig]):
    """Mixtral: a Llama whose feed-forward layers are mixtures of SwiGLU experts.

    The arguments are those of `LanguageModel`.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> import torch
        >>> config = MixtralConfig(8, 12, 4, 2, context_length=16, vocab_size=11, num_experts=4)
        >>> Mixtral(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])

    References:
        Jiang et al. 2024 (arXiv:2401.04088).
    """

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
