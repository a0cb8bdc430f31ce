"""Cross-attention: to a sequence that is encoded once, before the first token is decoded."""

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Float

from attn_spec.cache_checks import check_cache_window
from attn_spec.checks import check_positive, check_tokens, check_type
from attn_spec.module_checks import check_heads, given_heads
from attn_spec.scores import Scores
from flax_attn.attention import dot_product_attention
from flax_attn.backends.registry import check_backend
from flax_attn.functional.cache import KVCache
from flax_attn.functional.masks import Mask
from flax_attn.functional.padding import check_known_lengths
from flax_attn.functional.shapes import ArrayLike
from flax_attn.modules.dropout import Dropout
from flax_attn.modules.linear import Linear
from flax_attn.sharding.axes import constrain


class CrossAttention(nnx.Module):
    """Attention to another sequence, whose keys and values are computed once and kept.

        out_proj(concat_i(dropout(softmax(q_i k_i^T / sqrt(h))) v_i))
        with k and v of the other sequence

    Args:
        d_in: width of the tokens, and of the output.
        kdim: width of the tokens of the other sequence.
        dropout: the probability that a weight is dropped in train mode.
        num_heads: number of heads; divides d_in unless `head_dim` is given.
        qkv_bias: whether the projections of queries and values have a bias.
        key_bias: whether the projection of keys has a bias.
        head_dim: width h of a head; None is `d_in / num_heads`.
        out_bias: whether the output projection has a bias.
        scores: scale and soft cap of the scores.
        dtype: dtype of the computation; None promotes the dtypes of the input and the parameters.
        param_dtype: dtype of the parameters.
        precision: precision of the matrix products, as in `jax.lax.dot_general`.
        backend: name of an attention backend, or `"auto"`.
        rngs: random streams; parameters are drawn from `params`, with the distribution of
            `torch.nn.Linear`, and the keys of dropout from `dropout`.

    Shapes:
        tokens `(b, t, d_in)` and the other sequence `(b, s, kdim)` to `(b, t, d_in)`, or all
        without b.

    Raises:
        ValueError: if the heads do not divide, a size is not positive, `dropout` lies outside [0,
            1), the scores have more than a scale and a soft cap, or the backend is unknown; in the
            call, if an input has another rank or width.

    Example:
        >>> layer = CrossAttention(6, 4, num_heads=2, rngs=nnx.Rngs(0))
        >>> kept = layer.keep(jnp.ones((3, 7, 4)), lengths=jnp.array([7, 2, 5]))
        >>> layer(jnp.ones((3, 5, 6)), kept).shape
        (3, 5, 6)

    References:
        Vaswani et al. 2017 (arXiv:1706.03762).
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
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        backend: str = "auto",
        rngs: nnx.Rngs | None = None,
    ):
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
        self.scores, self.dtype, self.precision, self.backend = scores, dtype, precision, backend
        numerics = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "rngs": rngs,
        }
        into = {"axes": ("embed", "heads"), "unit": (1, self.head_dim), **numerics}
        out_of = {"axes": ("heads", "embed"), "unit": (self.head_dim, 1), **numerics}
        width = num_heads * self.head_dim
        self.W_query = Linear(d_in, width, qkv_bias, **into)
        self.W_key = Linear(kdim, width, key_bias, **into)
        self.W_value = Linear(kdim, width, qkv_bias, **into)
        self.out_proj = Linear(width, d_in, out_bias, **out_of)
        self.dropout = Dropout(dropout, rngs=rngs)

    def keep(
        self, encoded: Float[Array, "*b s d"], lengths: ArrayLike | int | None = None
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
        key = constrain(key, "batch", "kv_heads", "tokens", None)
        value = constrain(value, "batch", "kv_heads", "tokens", None)
        if lengths is None:
            return KVCache(key, value, s)
        if not isinstance(lengths, int):
            lengths = jnp.asarray(lengths, jnp.int32)
        return KVCache(key, value, lengths)

    def __call__(
        self, x: Float[Array, "*b t d"], kept: KVCache, *, dropout_key: Array | None = None
    ) -> Float[Array, "*b t d"]:
        """Return the output for the tokens; `kept` is what `keep` returned."""
        check_tokens("x", x, "d_in", self.d_in, None)
        check_type("kept", kept, KVCache, "what keep of this layer returns")
        kept.check_heads(x.shape[:-2], self.num_kv_heads, self.head_dim, self.head_dim)
        check_cache_window(kept.window, None)
        query = rearrange(self.W_query(x), "... t (n h) -> ... t n h", n=self.num_heads)
        query = constrain(query, "batch", "tokens", "heads", None)
        # The other sequence may have been computed in another dtype.
        key = rearrange(kept.key, "... k s h -> ... s k h").astype(query.dtype)
        value = rearrange(kept.value, "... k s h -> ... s k h").astype(query.dtype)
        context = dot_product_attention(
            query,
            key,
            value,
            mask=Mask.lengths(key=kept.length),
            scale=self.scores.scale,
            soft_cap=self.scores.soft_cap,
            dropout=self.dropout.keyed(dropout_key),
            precision=self.precision,
            backend=self.backend,
        )
        return self.out_proj(rearrange(context, "... t n h -> ... t (n h)"))
