"""Gemma 3, its text models."""

from dataclasses import dataclass, field
from typing import Any

from torch_ref.functional.positions import RoPE
from torch_ref.models.gemma2 import Gemma2, Gemma2Config


@dataclass(frozen=True)
class Gemma3Config(Gemma2Config):
    """The sizes of a Gemma 3: those of a `Gemma2Config` without caps, and local positions.

    Args:
        rope: rotary positions of the layers without a window.
        local_rope: rotary positions of the layers with a window.

    Example:
        >>> config = Gemma3Config(
        ...     1152, 6912, 4, 26, 1, head_dim=256, window=512, full_layers=(5, 11, 17, 23))
        >>> config.rope.base, config.local_rope.base
        (1000000.0, 10000.0)
    """

    context_length: int = 131072
    vocab_size: int = 262208
    rope: RoPE = field(default_factory=lambda: RoPE(1e6))
    score_cap: float | None = None
    logit_cap: float | None = None
    local_rope: RoPE = field(default_factory=RoPE)


class Gemma3(Gemma2[Gemma3Config]):
    """Gemma 3: a Gemma 2 with query and key norms, no caps, and two kinds of rotary positions.

    Layers with a window are rotated by `local_rope`, those without by `rope`. The arguments are
    those of `LanguageModel`.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> import torch
        >>> config = Gemma3Config(
        ...     8, 12, 4, 2, 1, context_length=16, vocab_size=11, window=3, full_layers=(1,))
        >>> Gemma3(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])

    References:
        Gemma Team 2025 (arXiv:2503.19786).
    """

    def rope(self, layer: int) -> RoPE:
        """Return the rotary positions of a layer, by whether it has a window."""
        return self.config.rope if self.window(layer) is None else self.config.local_rope

    def head_norms(self) -> dict[str, Any]:
        """Return the norms of queries and keys, each head by itself."""
        return {name: self.norm(self.config.head_width) for name in ("q_norm", "k_norm")}
