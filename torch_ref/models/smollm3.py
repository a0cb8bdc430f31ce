"""SmolLM3."""

from attn_spec.models.smollm3 import SmolLM3Config
from torch_ref.functional.positions import RoPE
from torch_ref.models.llama import Llama


class SmolLM3(Llama[SmolLM3Config]):
    """SmolLM3: a Llama without rotary positions in every fourth layer, and windows in some.

    Arguments and errors are those of `LanguageModel`.

    Example:
        >>> import torch
        >>> config = SmolLM3Config(
        ...     8, 12, 4, 2, 2, context_length=16, vocab_size=11, unrotated_layers=(1,))
        >>> SmolLM3(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])
    """

    def rope(self, layer: int) -> RoPE | None:
        """Return the rotary positions of a layer, None where it has none."""
        return None if layer in self.config.unrotated_layers else super().rope(layer)
