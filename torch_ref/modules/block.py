"""The transformer block: attention and feed-forward, each with a norm and a way around it."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torch_ref.functional.cache import KVCache
from torch_ref.functional.checks import check_choice, check_tokens
from torch_ref.functional.dropout import fold_in
from torch_ref.functional.masks import Mask
from torch_ref.functional.positions import RoPE
from torch_ref.functional.shapes import ArrayLike, Tokens
from torch_ref.modules.dropout import Dropout
from torch_ref.modules.feed_forward import FeedForward, GatedFeedForward
from torch_ref.modules.multi_head import MultiHeadAttention
from torch_ref.modules.norm import LayerNorm, RMSNorm

NORMS = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}


class TransformerBlock(nn.Module):
    """Attention, then feed-forward, each around a residual connection.

        norm_first:  x = x + drop(att(norm1(x)));  x = x + drop(ff(norm2(x)))     (GPT-2, Llama)
        otherwise:   x = norm1(x + drop(att(x)));  x = norm2(x + drop(ff(x)))     (the 2017 paper, BERT)

    Args:
        d_model: width of the tokens.
        context_length: the longest input taken; None is no limit.
        dropout: the probability that an attention weight, or an element of a sublayer's output, is dropped.
        num_heads: number of query heads; divides d_model.
        qkv_bias: whether the three input projections of the attention have a bias.
        num_kv_heads: number of key/value heads; None is num_heads.
        head_dim: width of a head; None is `d_model / num_heads`.
        causal: whether a token sees only itself and what came before.
        window: of a causal block, how many keys in all a token sees, itself included; None is all.
        out_bias: whether the output projection of the attention has a bias.
        rope: rotary positions of queries and keys; None is none.
        qk_norm: epsilon of an `RMSNorm` over each head of queries and keys; None is no norm.
        d_hidden: width inside the feed-forward layer; None is `4 * d_model`.
        activation: `"gelu_tanh"`, `"gelu_exact"` or `"silu"`.
        gated: whether the feed-forward layer is a `GatedFeedForward`: SwiGLU with `"silu"`.
        ff_bias: whether the feed-forward layer has biases.
        norm: `"layer_norm"` or `"rms_norm"`.
        norm_first: whether the norm comes before the sublayer, or after the sum.
        eps: of the norms.
        shortcut_dropout: the probability for elements of a sublayer's output; None is `dropout`, Llama takes 0.
        backend: of the attention call; `"auto"` or the name of one.

    Shapes:
        `(t, d_model)` or `(b, t, d_model)`, kept; the weights are `(n, t, t)` or `(b, n, t, t)`.

    Raises:
        ValueError: where its layers do, and if the norm is unknown.

    Example:
        >>> import torch
        >>> block = TransformerBlock(6, context_length=5, dropout=0.0, num_heads=2)
        >>> block(torch.ones((4, 5, 6))).shape
        torch.Size([4, 5, 6])

    References:
        Vaswani et al. 2017 (arXiv:1706.03762); Xiong et al. 2020, norm before or after (arXiv:2002.04745).
    """

    def __init__(
        self,
        d_model: int,
        context_length: int | None,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        window: int | None = None,
        out_bias: bool = True,
        rope: RoPE | None = None,
        qk_norm: float | None = None,
        d_hidden: int | None = None,
        activation: str = "gelu_tanh",
        gated: bool = False,
        ff_bias: bool = True,
        norm: str = "layer_norm",
        norm_first: bool = True,
        eps: float = 1e-5,
        shortcut_dropout: float | None = None,
        backend: str = "auto",
    ):
        super().__init__()
        check_choice("norm", norm, tuple(NORMS))
        self.d_model, self.norm_first = d_model, norm_first
        self.att = MultiHeadAttention(
            d_model,
            d_model,
            context_length,
            dropout,
            num_heads,
            qkv_bias,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            causal=causal,
            window=window,
            out_bias=out_bias,
            rope=rope,
            qk_norm=qk_norm,
            backend=backend,
        )
        self.ff = (GatedFeedForward if gated else FeedForward)(d_model, d_hidden, activation, ff_bias)
        self.norm1 = NORMS[norm](d_model, eps)
        self.norm2 = NORMS[norm](d_model, eps)
        self.drop_shortcut = Dropout(dropout if shortcut_dropout is None else shortcut_dropout)

    def forward(
        self,
        x: Tokens,
        *,
        mask: Mask | Tensor | None = None,
        bias: Float[Tensor, "..."] | Callable | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        cache: KVCache | None = None,
        return_weights: bool = False,
        dropout_key: Tensor | None = None,
    ) -> Any:
        """Return the tokens, followed by the weights if asked for, and by the cache if there is one.

        `mask`, `bias`, `positions`, `lengths` and `cache` are those of the attention, see `MultiHeadAttention`.
        Children 0, 1 and 2 of `dropout_key` decide the attention weights, the attention output and the feed-forward
        output that are dropped.
        """
        check_tokens("x", tuple(x.shape), "d_model", self.d_model, self.att.context_length)
        keys = [fold_in(dropout_key, i) for i in range(3)]
        attended = self.att(
            self.norm1(x) if self.norm_first else x,
            mask=mask,
            bias=bias,
            positions=positions,
            lengths=lengths,
            cache=cache,
            return_weights=return_weights,
            dropout_key=keys[0],
        )
        attended, *others = attended if isinstance(attended, tuple) else (attended,)
        x = x + self.drop_shortcut(attended, dropout_key=keys[1])
        x = x if self.norm_first else self.norm1(x)
        forwarded = self.ff(self.norm2(x) if self.norm_first else x)
        x = x + self.drop_shortcut(forwarded, dropout_key=keys[2])
        x = x if self.norm_first else self.norm2(x)
        return (x, *others) if others else x

    def init_cache(self, b: int | None, capacity: int, dtype: torch.dtype | None = None) -> KVCache:
        """Return an empty cache of the attention, see `MultiHeadAttention.init_cache`."""
        return self.att.init_cache(b, capacity, dtype)
