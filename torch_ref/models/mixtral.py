"""Mixtral."""

from typing import Any

from attn_spec.models.mixtral import MixtralConfig
from torch_ref.models.decoder import Decoder
from torch_ref.modules.experts import Experts
from torch_ref.modules.mixture import MixtureOfExperts
from torch_ref.modules.router import Router


class Mixtral(Decoder[MixtralConfig]):
    """Mixtral: a Llama whose feed-forward layers are mixtures of SwiGLU experts.

    Arguments and errors are those of `LanguageModel`.

    Example:
        >>> import torch
        >>> config = MixtralConfig(8, 12, 4, 2, context_length=16, vocab_size=11, num_experts=4)
        >>> Mixtral(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])
    """

    def feed_forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, layer: int, **options: Any
    ) -> MixtureOfExperts:
        """Return the mixture of a layer."""
        config = self.config
        # The mixture of the paper: weights of the chosen experts sum to 1.
        return MixtureOfExperts(
            Router(config.d_model, config.num_experts, config.top_k, **options),
            Experts(
                config.num_experts, config.d_model, config.d_hidden, config.activation, **options
            ),
        )
