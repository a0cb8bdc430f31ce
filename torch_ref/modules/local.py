"""Attention to what is near, in both directions."""

from typing import Any

from torch import Tensor

from attn_spec.checks import check_positive
from torch_ref.functional.masks import Mask, as_mask
from torch_ref.modules.multi_head import MultiHeadAttention


class LocalAttention(MultiHeadAttention):
    """Multi-head attention of every token to those at most `reach` before or after it.

    Shapes:
        those of `MultiHeadAttention`.

    Example:
        >>> import torch
        >>> layer = LocalAttention(6, 8, None, 0.0, 4, reach=1)
        >>> weights = layer.attend(torch.ones((2, 4, 6)), return_weights=True).weights
        >>> (weights[0, 0] > 0).int()
        tensor([[1, 1, 0, 0],
                [1, 1, 1, 0],
                [0, 1, 1, 1],
                [0, 0, 1, 1]], dtype=torch.int32)
    """

    def __init__(self, *sizes: Any, reach: int, **options: Any):
        check_positive(reach=reach)
        # The window decides alone: a causal mask would hide all that is behind a token.
        super().__init__(*sizes, causal=False, **options)
        self.reach = reach

    def _mask(self, mask: Mask | Tensor | None) -> Mask:
        # One mask for all layers: structure that kernels skip hidden blocks by.
        return Mask.window(self.reach, self.reach) & as_mask(mask)
