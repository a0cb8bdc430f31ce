"""Phi-3."""

from attn_spec.models.phi3 import Phi3Config
from torch_ref.models.decoder import Decoder


class Phi3(Decoder[Phi3Config]):
    """Phi-3: a Llama that may rotate a part of each head.

    Its projections are fused in the files. Arguments and errors are those of `LanguageModel`.

    Example:
        >>> import torch
        >>> config = Phi3Config(8, 12, 4, 2, num_kv_heads=2, context_length=16, vocab_size=11)
        >>> Phi3(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])
    """
