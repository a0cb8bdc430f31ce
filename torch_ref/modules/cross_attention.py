"""Cross-attention: to a sequence that is encoded once, before the first token is decoded."""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from attn_spec.cache_checks import check_cache_window
from attn_spec.checks import check_positive, check_tokens, check_type
from attn_spec.module_checks import check_heads, given_heads
from attn_spec.scores import Scores
from torch_ref.attention import check_backend, dot_product_attention
from torch_ref.functional.cache import KVCache
from torch_ref.functional.masks import Mask
from torch_ref.functional.padding import check_known_lengths
from torch_ref.functional.shapes import ArrayLike
from torch_ref.modules.dropout import Dropout
from torch_ref.modules.linear import Linear
from torch_ref.modules.typed import TypedModule


class CrossAttention(TypedModule):
    """Attention to another sequence, whose keys and values are computed once and kept.

        out_proj(concat_i(dropout(softmax(q_i k_i^T / sqrt(h))) v_i))
        with k and v of the other sequence

    Shapes:
        tokens `(b, t, d_in)` and the other sequence `(b, s, kdim)` to `(b, t, d_in)`, or all
        without b.

    Example:
        >>> layer = CrossAttention(6, 4, num_heads=2)
        >>> kept = layer.keep(torch.ones((3, 7, 4)), lengths=torch.tensor([7, 2, 5]))
        >>> layer(torch.ones((3, 5, 6)), kept).shape
        torch.Size([3, 5, 6])
    """

    def __init__(
        self,
        d_in: int,
        kdim: int,
        dropout: float = 0.0,
        num_heads: int | None = None,
        qkv_bias: bool = False,
        *,
        key_bias: bool = False,
        head_dim: int | None = None,
        out_bias: bool = True,
        scores: Scores = Scores(),  # noqa: B008 (frozen)
        backend: str = "auto",
    ):
        super().__init__()
        num_heads = given_heads(type(self).__name__, num_heads)
        check_heads(d_in, num_heads, num_heads, head_dim)
        check_positive(kdim=kdim)
        check_backend(backend)
        check_type("scores", scores, Scores, "scores=Scores(soft_cap=50.0)")
        # The positions of the other sequence are not those of the queries, which a function is
        # given.
        if scores.sinks or scores.function is not None:
            raise ValueError(
                "the scores of cross-attention have a scale and a soft cap alone; got"
                f" sinks={scores.sinks}, function={scores.function}. Leave out sinks and function"
            )
        self.d_in, self.d_out, self.kdim, self.vdim = d_in, d_in, kdim, kdim
        # As a `MultiHeadAttention` names them: caches and weights are read by these names.
        self.num_heads = self.num_kv_heads = num_heads
        self.head_dim = d_in // num_heads if head_dim is None else head_dim
        self.scores, self.backend = scores, backend
        width = num_heads * self.head_dim
        self.W_query = Linear(d_in, width, qkv_bias)
        self.W_key = Linear(kdim, width, key_bias)
        self.W_value = Linear(kdim, width, qkv_bias)
        self.out_proj = Linear(width, d_in, out_bias)
        self.dropout = Dropout(dropout)

    def keep(
        self, encoded: Float[Tensor, "*b s d"], lengths: ArrayLike | int | None = None
    ) -> KVCache:
        """Return the keys and values of the other sequence.

        The first `lengths` tokens of each row are real; the rest is padding.
        """
        check_tokens("encoded", encoded, "kdim", self.kdim, None)
        *batch, s, _ = encoded.shape
        check_known_lengths(lengths, batch[0] if batch else 1, s)
        key = self.W_key(encoded)
        value = self.W_value(encoded)
        key = rearrange(key, "... s (k h) -> ... k s h", k=self.num_heads)
        value = rearrange(value, "... s (k h) -> ... k s h", k=self.num_heads)
        # One number a row, also where one was given for all: rows can then be picked.
        given = torch.as_tensor(s if lengths is None else lengths)
        return KVCache(key, value, given.broadcast_to(batch))

    def forward(
        self, x: Float[Tensor, "*b t d"], kept: KVCache, *, dropout_key: Tensor | None = None
    ) -> Float[Tensor, "*b t d"]:
        """Return the output for the tokens; `kept` is what `keep` returned."""
        check_tokens("x", x, "d_in", self.d_in, None)
        check_type("kept", kept, KVCache, "what keep of this layer returns")
        kept.check_heads(tuple(x.shape[:-2]), self.num_kv_heads, self.head_dim, self.head_dim)
        check_cache_window(kept.window, None)
        query = rearrange(self.W_query(x), "... t (n h) -> ... t n h", n=self.num_heads)
        key = rearrange(kept.key, "... k s h -> ... s k h")
        value = rearrange(kept.value, "... k s h -> ... s k h")
        context = dot_product_attention(
            query,
            key,
            value,
            mask=Mask.lengths(key=kept.length),
            scale=self.scores.scale,
            soft_cap=self.scores.soft_cap,
            dropout=self.dropout.keyed(dropout_key),
            backend=self.backend,
        )
        return self.out_proj(rearrange(context, "... t n h -> ... t (n h)"))
