"""SmolLM3."""

from attn_spec.models.smollm3 import SmolLM3Config, read, write
from flax_attn.functional.positions import RoPE
from flax_attn.models.hugging_face.decoder import DECODER_LAYOUT
from flax_attn.models.hugging_face.family import Family
from flax_attn.models.llama import Llama


class SmolLM3(Llama[SmolLM3Config]):
    """SmolLM3: a Llama without rotary positions in every fourth layer, and windows in some.

    Arguments and errors are those of `LanguageModel`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = SmolLM3Config(
        ...     8, 12, 4, 2, 2, context_length=16, vocab_size=11, unrotated_layers=(1,))
        >>> SmolLM3(config, rngs=nnx.Rngs(0))(jnp.ones((3, 5), int)).shape
        (3, 5, 11)

    References:
        Bakouch et al. 2025, "SmolLM3: smol, multilingual, long-context reasoner"; Yang et al. 2025,
        layers without positions (arXiv:2501.18795).
    """

    family = Family({"smollm3": read}, write, DECODER_LAYOUT)

    def rope(self, layer: int) -> RoPE | None:
        """Return the rotary positions of a layer, None where it has none."""
        return None if layer in self.config.unrotated_layers else super().rope(layer)
