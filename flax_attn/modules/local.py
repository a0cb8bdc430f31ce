"""Attention to what is near, in both directions."""

from typing import Any

from jaxtyping import Array

from attn_spec.checks import check_positive
from flax_attn.functional.masks import Mask, as_mask
from flax_attn.modules.multi_head import MultiHeadAttention


class LocalAttention(MultiHeadAttention):
    """Multi-head attention of every token to those at most `reach` before or after it.

    Args:
        sizes: the positional arguments of `MultiHeadAttention`.
        reach: number of tokens that a token attends to on either side.
        options: the other arguments of `MultiHeadAttention`, all but `causal` and `window`.

    Shapes:
        those of `MultiHeadAttention`.

    Raises:
        ValueError: if `reach` is not positive, or where `MultiHeadAttention` does.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = LocalAttention(6, 8, None, 0.0, 4, reach=1, rngs=nnx.Rngs(0))
        >>> weights = layer.attend(jnp.ones((2, 4, 6)), return_weights=True).weights
        >>> (weights[0, 0] > 0).astype(int)
        Array([[1, 1, 0, 0],
               [1, 1, 1, 0],
               [0, 1, 1, 1],
               [0, 0, 1, 1]], dtype=int32)

    References:
        Beltagy et al. 2020 (arXiv:2004.05150); Warner et al. 2024, ModernBERT (arXiv:2412.13663).
    """

    def __init__(self, *sizes: Any, reach: int, **options: Any):
        check_positive(reach=reach)
        # The window decides alone: a causal mask would hide all that is behind a token.
        super().__init__(*sizes, causal=False, **options)
        self.reach = reach

    def _mask(self, mask: Mask | Array | None) -> Mask:
        # One mask for all layers: structure that kernels skip hidden blocks by.
        return Mask.window(self.reach, self.reach) & as_mask(mask)
