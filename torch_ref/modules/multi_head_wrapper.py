"""Causal heads side by side, each with projections of its own."""

import torch
from torch import Tensor, nn

from attn_spec.checks import check_positive
from attn_spec.module_checks import given_heads
from torch_ref.functional.cache_base import Cache
from torch_ref.functional.dropout import fold_in
from torch_ref.functional.masks import Mask
from torch_ref.functional.outputs import Outputs
from torch_ref.functional.shapes import Tokens
from torch_ref.modules.calls import run_layer
from torch_ref.modules.causal import CausalAttention
from torch_ref.modules.typed import TypedModule


class MultiHeadAttentionWrapper(TypedModule):
    """`concat(head_1(x), ..., head_n(x))` of `CausalAttention` heads; no output projection.

    The plain way to many heads: n small products instead of one. `MultiHeadAttention` computes all
    heads at once.

    Shapes:
        `(t, d_in)` to `(t, d_out * n)` or `(b, t, d_in)` to `(b, t, d_out * n)`; the weights are
        `(n, t, t)` or `(b, n, t, t)`.

    Example:
        >>> layer = MultiHeadAttentionWrapper(3, 2, num_heads=4)
        >>> layer(torch.ones((5, 6, 3))).shape
        torch.Size([5, 6, 8])
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int | None = None,
        dropout: float = 0.0,
        num_heads: int | None = None,
        qkv_bias: bool = False,
        *,
        backend: str = "auto",
    ):
        super().__init__()
        num_heads = given_heads(type(self).__name__, num_heads)
        check_positive(num_heads=num_heads)
        # Each draws its own parameters, one head after the other, as the book does.
        self.heads = nn.ModuleList(
            [
                CausalAttention(d_in, d_out, context_length, dropout, qkv_bias, backend=backend)
                for _ in range(num_heads)
            ]
        )

    def attend(
        self,
        x: Tokens,
        *,
        mask: Mask | Tensor | None = None,
        return_weights: bool = False,
        dropout_key: Tensor | None = None,
    ) -> Outputs[Cache]:
        """Return the context vectors, with the weights if `return_weights`.

        Child i of `dropout_key` decides what head i drops.
        """
        found = []
        for i, head in enumerate(self.heads):
            # Equal keys would drop the same weights in every head.
            key = fold_in(dropout_key, i)
            options = {"mask": mask, "dropout_key": key, "return_weights": return_weights}
            found.append(run_layer(head, x, **options))
        output = torch.cat([one.output for one in found], dim=-1)
        if not return_weights:
            return Outputs(output)
        return Outputs(output, torch.stack([one.weights for one in found], dim=-3))

    def forward(
        self,
        x: Tokens,
        *,
        mask: Mask | Tensor | None = None,
        dropout_key: Tensor | None = None,
    ) -> Tensor:
        """Return the context vectors; `attend` describes the arguments."""
        return self.attend(x, mask=mask, dropout_key=dropout_key).output
