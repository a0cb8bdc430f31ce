"""Differential attention: the difference of two softmaxes."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attn_spec.checks import check_positive
from attn_spec.module_checks import given_heads
from torch_ref.functional.dtypes import accumulation_dtype
from torch_ref.functional.positions import RoPE
from torch_ref.modules.multi_head import MultiHeadAttention
from torch_ref.modules.norm import rms_normed


class DifferentialAttention(MultiHeadAttention):
    """Multi-head attention with the difference of two softmaxes.

        out_proj(concat_i((1 - lambda_init) * rms_normed((A_i - lambda A_j) [v_i, v_j])))
        with j = i + num_heads / 2,  A_i = softmax(mask(q_i k_i^T / sqrt(h))),
        lambda = exp(q1 . k1) - exp(q2 . k2) + lambda_init

    The difference cancels the weight that both softmaxes give to irrelevant tokens.

    Head `i` of the first half of the query heads is paired with head `j` of the second, as in
    transformers' DiffLlama; the code of the paper pairs neighbours. Both attend to the joined
    values of both, as wide as two heads. `q1`, `k1`, `q2` and `k2` are the parameters `lambda_q1`
    to `lambda_k2`, shared by all heads. In train mode each softmax drops its own weights.

    Shapes:
        `(b, t, d_in)` to `(b, t, d_out)`, weights `(b, n, t, t)`, those of both softmaxes; or all
        without b.

    Example:
        >>> layer = DifferentialAttention(6, 8, num_heads=4, num_kv_heads=2)
        >>> layer(torch.ones((3, 5, 6))).shape
        torch.Size([3, 5, 8])
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
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        out_bias: bool = True,
        window: int | None = None,
        rope: RoPE | None = None,
        lambda_init: float = 0.8,
        eps: float = 1e-5,
        backend: str = "auto",
    ):
        num_heads = given_heads(type(self).__name__, num_heads)
        # Before the parts are built, which would name another argument.
        _check_pairs(num_heads if num_kv_heads is None else num_kv_heads)
        super().__init__(
            *(d_in, d_out, context_length, dropout, num_heads, qkv_bias),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            out_bias=out_bias,
            window=window,
            rope=rope,
            backend=backend,
        )
        self.lambda_init, self.eps = lambda_init, eps
        # Both products start near 0, so that lambda starts near `lambda_init`.
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(0.1 * torch.randn(self.head_dim)) for _ in range(4)
        )

    def difference(self) -> Float[Tensor, ""]:
        """Return lambda, the factor on the second softmax, in at least float32."""
        vectors = (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2)
        q1, k1, q2, k2 = (x.to(accumulation_dtype(x.dtype)) for x in vectors)
        return torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + self.lambda_init

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *others: Any, return_weights: bool, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        # The key/value heads of both halves get the values of both: then query heads are grouped as
        # always.
        of_both = torch.cat(v.chunk(2, dim=-2), dim=-1)
        values = torch.cat([of_both, of_both], dim=-2)
        heads, weights = super()._attend(
            q, k, values, *others, return_weights=return_weights, **options
        )
        first, second = heads.to(accumulation_dtype(heads.dtype)).chunk(2, dim=-2)
        factor = self.difference().to(first.dtype)
        # Each head by itself, as a group norm does: their scales differ after the subtraction.
        difference = first - factor * second
        normed = rms_normed(difference, self.eps)
        # What the subtraction takes from the heads at the start of training.
        scale = 1 - self.lambda_init
        return (scale * normed).to(heads.dtype), weights


def differential_lambda(layer: int) -> float:
    """Return `lambda_init` of a layer, counted from 0: `0.8 - 0.6 exp(-0.3 layer)`.

    Example:
        >>> [round(differential_lambda(layer), 3) for layer in (0, 1, 20)]
        [0.2, 0.356, 0.799]
    """
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


def _check_pairs(num_kv_heads: int) -> None:
    """Raise unless the key/value heads make pairs, and so the query heads that they serve."""
    check_positive(num_kv_heads=num_kv_heads)
    if num_kv_heads % 2:
        raise ValueError(
            "differential attention pairs the heads of the first half with those of the second, so"
            f" num_kv_heads must be even; got num_kv_heads={num_kv_heads}. Pass {num_kv_heads + 1},"
            " or another even number"
        )
