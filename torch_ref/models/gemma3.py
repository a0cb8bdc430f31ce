"""Gemma 3, its text models."""

from typing import Any

from attn_spec.models.gemma3 import Gemma3Config
from torch_ref.functional.positions import RoPE
from torch_ref.models.gemma2 import Gemma2


class Gemma3(Gemma2[Gemma3Config]):
    """Gemma 3: a Gemma 2 with query and key norms, no caps, and two kinds of rotary positions.

    Layers with a window are rotated by `local_rope`, those without by `rope`. Arguments and errors
    are those of `LanguageModel`.

    Example:
        >>> import torch
        >>> config = Gemma3Config(
        ...     8, 12, 4, 2, 1, context_length=16, vocab_size=11, window=3, full_layers=(1,))
        >>> Gemma3(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])
    """

    def rope(self, layer: int) -> RoPE:
        """Return the rotary positions of a layer, by whether it has a window."""
        config = self.config
        # Layers with a window have a base of their own, as they look less far.
        return RoPE.of(config.rope if self.window(layer) is None else config.local_rope)

    def head_norms(self) -> dict[str, Any]:
        """Return the norms of queries and keys, each head by itself."""
        return {name: self.norm(self.config.head_width) for name in ("q_norm", "k_norm")}
