"""Mixtral."""

from typing import Any

from attn_spec.models.mixtral import MixtralConfig, read, write
from flax_attn.models.decoder import Decoder
from flax_attn.models.hugging_face.experts import fused, one_by_one
from flax_attn.models.hugging_face.family import Family
from flax_attn.modules.experts import Experts
from flax_attn.modules.mixture import MixtureOfExperts
from flax_attn.modules.router import Router


class Mixtral(Decoder[MixtralConfig]):
    """Mixtral: a Llama whose feed-forward layers are mixtures of SwiGLU experts.

    Arguments and errors are those of `LanguageModel`.

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
        {"mixtral": read},
        write,
        one_by_one("model.layers.{i}.block_sparse_moe", "w1", "w3", "w2"),
        (fused("model.layers.{i}.mlp"),),
    )

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
