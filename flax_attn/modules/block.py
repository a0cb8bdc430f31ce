"""The transformer block: attention and feed-forward, each with a norm and a way around it."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Float

from flax_attn.functional.cache import KVCache
from flax_attn.functional.checks import check_choice, check_tokens
from flax_attn.functional.dropout import fold_in
from flax_attn.functional.masks import Mask
from flax_attn.functional.positions import RoPE
from flax_attn.functional.shapes import ArrayLike, Tokens
from flax_attn.modules.dropout import Dropout
from flax_attn.modules.feed_forward import FeedForward, GatedFeedForward
from flax_attn.modules.multi_head import MultiHeadAttention
from flax_attn.modules.norm import LayerNorm, RMSNorm

NORMS = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}


class TransformerBlock(nnx.Module):
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
        dtype: of the computation; None is that of the input and the parameters together.
        param_dtype: of the parameters.
        precision: of the matrix products, as in `jax.lax.dot_general`.
        backend: of the attention call; `"auto"` or the name of one.
        rngs: random streams; parameters are drawn from `params`, with the distribution of `torch.nn.Linear`,
            and the keys of dropout from `dropout`.

    Shapes:
        `(t, d_model)` or `(b, t, d_model)`, kept; the weights are `(n, t, t)` or `(b, n, t, t)`.

    Raises:
        ValueError: where its layers do, and if the norm is unknown.

    Example:
        >>> block = TransformerBlock(6, context_length=5, dropout=0.0, num_heads=2, rngs=nnx.Rngs(0))
        >>> block(jnp.ones((4, 5, 6))).shape
        (4, 5, 6)

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
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        backend: str = "auto",
        rngs: nnx.Rngs | None = None,
    ):
        check_choice("norm", norm, tuple(NORMS))
        numerics = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.d_model, self.norm_first, self.dtype = d_model, norm_first, dtype
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
            precision=precision,
            backend=backend,
            **numerics,
        )
        feed_forward = GatedFeedForward if gated else FeedForward
        self.ff = feed_forward(d_model, d_hidden, activation, ff_bias, precision=precision, **numerics)
        self.norm1 = NORMS[norm](d_model, eps, **numerics)
        self.norm2 = NORMS[norm](d_model, eps, **numerics)
        self.drop_shortcut = Dropout(dropout if shortcut_dropout is None else shortcut_dropout, rngs=rngs)

    def __call__(
        self,
        x: Tokens,
        *,
        mask: Mask | Array | None = None,
        bias: Float[Array, "..."] | Callable | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        cache: KVCache | None = None,
        return_weights: bool = False,
        dropout_key: Array | None = None,
    ) -> Any:
        """Return the tokens, followed by the weights if asked for, and by the cache if there is one.

        `mask`, `bias`, `positions`, `lengths` and `cache` are those of the attention, see `MultiHeadAttention`.
        Children 0, 1 and 2 of `dropout_key` decide the attention weights, the attention output and the feed-forward
        output that are dropped.
        """
        check_tokens("x", x.shape, "d_model", self.d_model, self.att.context_length)
        x = x if self.dtype is None else x.astype(self.dtype)
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

    def init_cache(self, b: int | None, capacity: int, dtype: Dtype | None = None) -> KVCache:
        """Return an empty cache of the attention, see `MultiHeadAttention.init_cache`."""
        return self.att.init_cache(b, capacity, dtype)
