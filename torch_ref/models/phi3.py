"""Phi-3."""

from dataclasses import dataclass

from torch_ref.models.decoder import Decoder, DecoderConfig


@dataclass(frozen=True)
class Phi3Config(DecoderConfig):
    """The sizes of a Phi-3: those of a `DecoderConfig`.

    With `RoPE(width=...)` a part of each head is rotated.

    Example:
        >>> Phi3Config(3072, 8192, num_heads=32, num_layers=32, window=2047).vocab_size
        32064
    """

    context_length: int = 4096
    vocab_size: int = 32064
    eps: float = 1e-5


class Phi3(Decoder[Phi3Config]):
    """Phi-3: a Llama that may rotate a part of each head.

    Its projections are fused in the files. The arguments are those of `LanguageModel`.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> import torch
        >>> config = Phi3Config(8, 12, 4, 2, num_kv_heads=2, context_length=16, vocab_size=11)
        >>> Phi3(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])

    References:
        Microsoft 2024 (arXiv:2404.14219).
    """
