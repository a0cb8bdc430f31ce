"""Gemma 3, its text models."""

from typing import Any

from attn_spec.models.gemma3 import Gemma3Config, read, write
from flax_attn.functional.positions import RoPE
from flax_attn.models.gemma2 import Gemma2
from flax_attn.models.hugging_face.decoder import POST_NORM_LAYOUT
from flax_attn.models.hugging_face.family import Family


class Gemma3(Gemma2[Gemma3Config]):
    """Gemma 3: a Gemma 2 with query and key norms, no caps, and two kinds of rotary positions.

    Layers with a window are rotated by `local_rope`, those without by `rope`. Arguments and errors
    are those of `LanguageModel`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = Gemma3Config(
        ...     8, 12, 4, 2, 1, context_length=16, vocab_size=11, window=3, full_layers=(1,))
        >>> Gemma3(config, rngs=nnx.Rngs(0))(jnp.ones((3, 5), int)).shape
        (3, 5, 11)

    References:
        Gemma Team 2025 (arXiv:2503.19786).
    """

    family = Family({"gemma3_text": read}, write, POST_NORM_LAYOUT)

    def rope(self, layer: int) -> RoPE:
        """Return the rotary positions of a layer, by whether it has a window."""
        config = self.config
        # Layers with a window have a base of their own, as they look less far.
        return RoPE.of(config.rope if self.window(layer) is None else config.local_rope)

    def head_norms(self, **numerics: Any) -> dict[str, Any]:
        """Return the norms of queries and keys, each head by itself."""
        return {
            name: self.norm(self.config.head_width, **numerics) for name in ("q_norm", "k_norm")
        }
