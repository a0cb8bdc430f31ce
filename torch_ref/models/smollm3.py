"""SmolLM3."""

from dataclasses import dataclass, field

from attn_spec.checks import check_layers
from torch_ref.functional.positions import RoPE
from torch_ref.models.llama import Llama, LlamaConfig


@dataclass(frozen=True)
class SmolLM3Config(LlamaConfig):
    """The sizes of a SmolLM3: those of a `LlamaConfig`, and the layers without rotary positions.

    Args:
        unrotated_layers: the layers whose queries and keys are not rotated, counted from 0.

    Raises:
        ValueError: if there is no layer of a number in `full_layers` or `unrotated_layers`.

    Example:
        >>> config = SmolLM3Config(2048, 11008, 16, 36, 4, unrotated_layers=tuple(range(3, 36, 4)))
        >>> config.rope.base, config.unrotated_layers[:2]
        (2000000.0, (3, 7))
    """

    context_length: int = 32768
    vocab_size: int = 128256
    rope: RoPE = field(default_factory=lambda: RoPE(2e6))
    tied: bool = True
    unrotated_layers: tuple[int, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        check_layers("unrotated_layers", self.unrotated_layers, self.num_layers)


class SmolLM3(Llama[SmolLM3Config]):
    """SmolLM3: a Llama without rotary positions in every fourth layer, and windows in some.

    The arguments are those of `LanguageModel`.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> import torch
        >>> config = SmolLM3Config(
        ...     8, 12, 4, 2, 2, context_length=16, vocab_size=11, unrotated_layers=(1,))
        >>> SmolLM3(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])

    References:
        Bakouch et al. 2025, "SmolLM3: smol, multilingual, long-context reasoner"; Yang et al. 2025,
        layers without positions (arXiv:2501.18795).
    """

    def rope(self, layer: int) -> RoPE | None:
        """Return the rotary positions of a layer, None where it has none."""
        return None if layer in self.config.unrotated_layers else super().rope(layer)
