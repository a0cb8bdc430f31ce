"""Causal heads side by side, each with projections of its own."""

from typing import Any

import torch
from torch import Tensor, nn

from torch_ref.functional.checks import check_positive
from torch_ref.functional.dropout import fold_in
from torch_ref.functional.masks import Mask
from torch_ref.functional.shapes import Tokens
from torch_ref.modules.causal import CausalAttention
from torch_ref.modules.typed import TypedModule


class MultiHeadAttentionWrapper(TypedModule):
    """`concat(head_1(x), ..., head_n(x))` of `CausalAttention` heads; no output projection.

    The plain way to many heads: n small products instead of one. `MultiHeadAttention` computes all heads at once.

    Args:
        d_in: width of the input.
        d_out: width of each head's output; that of the module is `d_out * num_heads`.
        context_length: the longest input taken; None is no limit.
        dropout: the probability that a weight is dropped in train mode.
        num_heads: number of heads.
        qkv_bias: whether the projections have a bias.
        backend: of the attention call; `"auto"` or the name of one.

    Shapes:
        `(t, d_in)` to `(t, d_out * n)` or `(b, t, d_in)` to `(b, t, d_out * n)`; the weights are `(n, t, t)` or
        `(b, n, t, t)`.

    Raises:
        ValueError: where `CausalAttention` does, and if `num_heads` is not positive.

    Example:
        >>> layer = MultiHeadAttentionWrapper(3, 2, context_length=6, dropout=0.0, num_heads=4)
        >>> layer(torch.ones((5, 6, 3))).shape
        torch.Size([5, 6, 8])
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int | None,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
        *,
        backend: str = "auto",
    ):
        super().__init__()
        check_positive(num_heads=num_heads)
        self.heads = nn.ModuleList(
            [CausalAttention(d_in, d_out, context_length, dropout, qkv_bias, backend=backend) for _ in range(num_heads)]
        )

    def forward(
        self,
        x: Tokens,
        *,
        mask: Mask | Tensor | None = None,
        return_weights: bool = False,
        dropout_key: Tensor | None = None,
    ) -> Any:
        """Return the context vectors, and if asked `(context, weights)`; head i drops by child i of `dropout_key`."""
        results = [
            head(x, mask=mask, return_weights=return_weights, dropout_key=fold_in(dropout_key, i))
            for i, head in enumerate(self.heads)
        ]
        if not return_weights:
            return torch.cat(results, dim=-1)
        contexts, weights = zip(*results, strict=True)
        return torch.cat(contexts, dim=-1), torch.stack(weights, dim=-3)
