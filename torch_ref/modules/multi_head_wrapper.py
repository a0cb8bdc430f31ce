"""Causal heads side by side, each with projections of its own."""

from typing import Literal, overload

import torch
from torch import Tensor, nn

from attn_spec.checks import check_positive
from torch_ref.functional.dropout import fold_in
from torch_ref.functional.masks import Mask
from torch_ref.functional.shapes import Tokens
from torch_ref.modules.calls import unpack
from torch_ref.modules.causal import CausalAttention
from torch_ref.modules.typed import TypedModule


class MultiHeadAttentionWrapper(TypedModule):
    """`concat(head_1(x), ..., head_n(x))` of `CausalAttention` heads; no output projection.

    The plain way to many heads: n small products instead of one. `MultiHeadAttention` computes all
    heads at once.

    Args:
        d_in: width of the input.
        d_out: width of each head's output; that of the module is `d_out * num_heads`.
        context_length: maximum length of the input; None is no limit.
        dropout: the probability that a weight is dropped in train mode.
        num_heads: number of heads.
        qkv_bias: whether the projections have a bias.
        backend: name of an attention backend, or `"auto"`.

    Shapes:
        `(t, d_in)` to `(t, d_out * n)` or `(b, t, d_in)` to `(b, t, d_out * n)`; the weights are
        `(n, t, t)` or `(b, n, t, t)`.

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
            [
                CausalAttention(d_in, d_out, context_length, dropout, qkv_bias, backend=backend)
                for _ in range(num_heads)
            ]
        )

    @overload
    def forward(
        self, x: Tensor, *, mask: Mask | Tensor | None = None,
        return_weights: Literal[False] = False, dropout_key: Tensor | None = None,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def forward(
        self, x: Tensor, *, mask: Mask | Tensor | None = None, return_weights: Literal[True],
        dropout_key: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def forward(
        self,
        x: Tokens,
        *,
        mask: Mask | Tensor | None = None,
        return_weights: bool = False,
        dropout_key: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the context vectors, followed by the weights if `return_weights`.

        Child i of `dropout_key` decides what head i drops.
        """
        results = [
            unpack(
                head(
                    x, return_weights=return_weights, mask=mask, dropout_key=fold_in(dropout_key, i)
                ),
                return_weights,
            )
            for i, head in enumerate(self.heads)
        ]
        output = torch.cat([result.output for result in results], dim=-1)
        weights = [result.weights for result in results if result.weights is not None]
        return (output, torch.stack(weights, dim=-3)) if return_weights else output
