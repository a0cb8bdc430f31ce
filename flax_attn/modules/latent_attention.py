"""Multi-head latent attention: keys and values of all heads from one small vector a token."""

from typing import Any

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Float

from attn_spec.attention_checks import check_causal_window
from attn_spec.checks import check_choice, check_context_length, check_positive, check_type
from attn_spec.latent_checks import check_latent_norm
from attn_spec.module_checks import given_heads
from attn_spec.other_libraries import OF_LAYERS, names_remedies
from attn_spec.scores import Scores
from flax_attn.backends.registry import check_backend
from flax_attn.functional.absorption import Absorption
from flax_attn.functional.cache import KVCache
from flax_attn.functional.masks import Mask
from flax_attn.functional.outputs import Outputs
from flax_attn.functional.parameter_sums import spread
from flax_attn.functional.positions import RoPE
from flax_attn.functional.shapes import ArrayLike
from flax_attn.modules.calls import Bias, CallOptions, check_self_attention
from flax_attn.modules.dropout import Dropout
from flax_attn.modules.head_attention import HeadAttention
from flax_attn.modules.heads import Norm
from flax_attn.modules.initialisation import filled
from flax_attn.modules.linear import Linear
from flax_attn.modules.work import Work, products
from flax_attn.sharding.axes import constrain
from flax_attn.sharding.parameters import named

FORMS = ("auto", "plain", "absorbed")


class MultiHeadLatentAttention(HeadAttention):
    """Multi-head latent attention (MLA), which caches only one small vector for each token.

        latent_s, rotated_s = kv_norm(D_kv x_s), rope(R x_s)
        k_i,s = [K_i latent_s, rotated_s],  v_i,s = V_i latent_s
        q_i,t = [Q_i q_t, rope(P_i q_t)],  q_t = q_norm(D_q x_t)
        out_proj(concat_i(dropout(softmax(mask(scale q_i k_i^T))) v_i))

    `[ ]` joins features, and scale is `1 / sqrt(width of k_i)`. A latent is `kv_lora_rank` wide,
    and a rotated part, which all heads share, `qk_rope_head_dim`. Without `q_lora_rank`, `q_t` is
    `x_t`.

    A decoding step reads `kv_lora_rank + qk_rope_head_dim` numbers for each token and layer: in
    DeepSeek-V3 in bfloat16 1152 bytes, instead of 81920 for the keys and values of all heads. The
    cache is a `KVCache` of one head: keys `[latent, rotated]`, values of width 0.

    Two forms compute the same:

    - `"plain"`: the keys and values of all heads are computed from the latents, as above.
    - `"absorbed"`: as `q_i (K_i latent) = (K_i^T q_i) latent`, all heads attend to the latents
      themselves, as in multi-query attention, and V_i is applied to the result. Nothing is computed
      again for earlier tokens.

    `"auto"` is `"absorbed"` where there are more keys than queries, as there are with a cache, and
    `"plain"` otherwise.

    Args:
        d_in: width of the input.
        d_out: width of the output.
        context_length: maximum length of the input; None is no limit.
        dropout: the probability that a weight is dropped in train mode.
        num_heads: number of heads.
        qkv_bias: whether the projections of the input down to queries and latents have a bias.
        kv_lora_rank: width of the latent of keys and values.
        q_lora_rank: width of the latent of queries; None projects queries from the input itself.
        qk_nope_head_dim: width of the part of a query and a key that is not rotated.
        qk_rope_head_dim: width of the part of a query and a key that is rotated.
        v_head_dim: width of a value.
        out_bias: whether the output projection has a bias.
        causal: whether a token attends only to itself and to the tokens before it.
        window: number of keys that a token attends to, itself included; None is all. It needs
            `causal`.
        rope: rotary positions of the rotated parts; None is no rotation. DeepSeek interleaves them.
        q_norm: norm of the latent of queries; None is no norm.
        kv_norm: norm of the latent of keys and values; None is no norm.
        scores: scale, soft cap and sinks of the scores.
        form: `"auto"`, `"plain"` or `"absorbed"`.
        dtype: dtype of the computation; None promotes the dtypes of the input and the parameters.
        param_dtype: dtype of the parameters.
        precision: precision of the matrix products, as in `jax.lax.dot_general`.
        backend: name of an attention backend, or `"auto"`.
        rngs: random streams; parameters are drawn from `params`, with the distribution of
            `torch.nn.Linear`, and the keys of dropout from `dropout`.

    Shapes:
        `(b, t, d_in)` to `(b, t, d_out)`, weights `(b, n, t, s)`; or all without b.

    Raises:
        ValueError: if a size is not positive, a norm is not as wide as its latent or has none,
            `dropout` lies outside [0, 1), `rope` does not fit, there is a window without `causal`,
            or form or backend is unknown; in the call, if the input has another rank or width or is
            longer than `context_length`, if mask, bias or positions do not fit, there are positions
            without `rope`, if the cache is that of another module, or if more tokens come in one
            call than it can hold.

    Example:
        >>> layer = MultiHeadLatentAttention(
        ...     6, 6, num_heads=4, kv_lora_rank=3,
        ...     qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=5,
        ...     rope=RoPE(interleaved=True), rngs=nnx.Rngs(0)
        ... )
        >>> found = layer.attend(jnp.ones((2, 5, 6)), cache=layer.init_cache(2, 8))
        >>> found.output.shape, found.cache.key.shape, found.cache.value.size
        ((2, 5, 6), (2, 1, 8, 5), 0)

    References:
        DeepSeek-AI 2024, DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437).
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
        kv_lora_rank: int,
        q_lora_rank: int | None = None,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        out_bias: bool = False,
        causal: bool = True,
        window: int | None = None,
        rope: RoPE | None = None,
        q_norm: Norm | None = None,
        kv_norm: Norm | None = None,
        scores: Scores = Scores(),  # noqa: B008 (frozen)
        form: str = "auto",
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        backend: str = "auto",
        rngs: nnx.Rngs | None = None,
    ):
        num_heads = given_heads(type(self).__name__, num_heads)
        # Checked together, so that an error names them all.
        widths = {
            "qk_nope_head_dim": qk_nope_head_dim,
            "qk_rope_head_dim": qk_rope_head_dim,
            "v_head_dim": v_head_dim,
        }
        check_positive(
            d_in=d_in, d_out=d_out, num_heads=num_heads, kv_lora_rank=kv_lora_rank, **widths
        )
        check_context_length(context_length)
        check_causal_window(window, causal)
        check_choice("form", form, FORMS)
        check_backend(backend)
        check_type("rope", rope, RoPE | None, "rope=RoPE(interleaved=True), or None")
        check_type("scores", scores, Scores, "scores=Scores(soft_cap=50.0)")
        # It rotates the last features alone, which are not absorbed in a matrix.
        if rope is not None:
            rope.check_head_dim(qk_rope_head_dim)
        # Norms of latents, not of heads: their width is the rank.
        check_latent_norm("q_norm", q_norm, q_lora_rank)
        check_latent_norm("kv_norm", kv_norm, kv_lora_rank)
        self.d_in, self.d_out, self.num_heads = d_in, d_out, num_heads
        # What the scale follows from: a query has both parts.
        self.head_dim = qk_nope_head_dim + qk_rope_head_dim
        self.kv_lora_rank, self.qk_nope_head_dim = kv_lora_rank, qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.context_length, self.causal, self.window = context_length, causal, window
        self.rope, self.scores, self.form, self.backend = rope, scores, form, backend
        self.dtype, self.precision = dtype, precision
        numerics = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "rngs": rngs,
        }
        down = {"axes": ("embed", None), **numerics}
        first = "embed" if q_lora_rank is None else None
        of_query = {"axes": (first, "heads"), "unit": (1, self.head_dim), **numerics}
        self.W_query_down = (
            None if q_lora_rank is None else Linear(d_in, q_lora_rank, qkv_bias, **down)
        )
        to_heads = Linear(q_lora_rank or d_in, num_heads * self.head_dim, False, **of_query)
        self.W_query, self.W_query_up = (
            (to_heads, None) if q_lora_rank is None else (None, to_heads)
        )
        self.W_latent = Linear(d_in, kv_lora_rank + qk_rope_head_dim, qkv_bias, **down)
        both = qk_nope_head_dim + v_head_dim
        of_latent = {"axes": (None, "heads"), "unit": (1, both), **numerics}
        of_output = {"axes": ("heads", "embed"), "unit": (v_head_dim, 1), **numerics}
        self.W_key_value = Linear(kv_lora_rank, num_heads * both, False, **of_latent)
        self.out_proj = Linear(num_heads * v_head_dim, d_out, out_bias, **of_output)
        self.q_norm, self.kv_norm, self.W_gate = q_norm, kv_norm, None
        sinks = filled(num_heads, 0, param_dtype) if scores.sinks else None
        self.sinks = None if sinks is None else nnx.Param(sinks, **named("heads"))
        self.dropout = Dropout(dropout, rngs=rngs)

    @names_remedies(OF_LAYERS)
    def attend(
        self,
        query: Float[Array, "*b t d_in"],
        *,
        mask: Mask | Array | None = None,
        bias: Bias | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        cache: KVCache | None = None,
        return_weights: bool = False,
        dropout_key: Array | None = None,
    ) -> Outputs[KVCache]:
        """Return the output with the weights and the new cache, if requested.

        The arguments are those of `MultiHeadAttention.attend`.
        """
        check_self_attention(self.rope, query, None, positions, cache)
        options: CallOptions = {
            "mask": mask,
            "bias": bias,
            "positions": positions,
            "lengths": lengths,
            "dropout_key": dropout_key,
        }
        return self._run(query, cache=cache, return_weights=return_weights, **options)

    def init_cache(self, b: int | None, capacity: int, dtype: Dtype | None = None) -> KVCache:
        """Return an empty cache of up to `capacity` tokens; see `MultiHeadAttention.init_cache`.

        `dtype` None is that of the projection to the latent.

        Raises:
            ValueError: if the capacity is beyond `context_length`, or less than the window.
        """
        return self._empty(b, capacity, dtype, self.W_latent)

    @property
    def _cached(self) -> tuple[int, int, int]:
        # [latent, rotated] is all that is cached.
        return 1, self.kv_lora_rank + self.qk_rope_head_dim, 0

    def _project(self, query: Array, positions: ArrayLike) -> tuple[Array, Array, Array]:
        # Latents are the keys; values are made from them, and have no features of their own.
        latents = self._latents(query, positions)
        return self._queries(query, positions), latents, latents[..., :0]

    def _attend(
        self, q: Array, k: Array, v: Array, *others: Any, **options: Any
    ) -> tuple[Array, Array | None]:
        # With a cache, the plain form would compute keys for all tokens that it can hold.
        t, s = q.shape[-3], k.shape[-3]
        if not self._absorbs(t, s):
            k, v = self._keys_and_values(k)
            return super()._attend(q, k, v, *others, **options)
        # The latents are keys and values of one head, which all query heads read.
        absorption = self._absorption
        latent = k[..., : self.kv_lora_rank]
        q = absorption.query(q)
        context, weights = super()._attend(q, k, latent, *others, **options)
        return absorption.values(context), weights

    def _queries(self, x: Array, positions: ArrayLike) -> Array:
        """Return the queries `(b, t, n, h)`, their last features rotated."""
        if self.W_query_down is not None:
            x = self.W_query_down(x)
        if self.q_norm is not None:
            x = self.q_norm(x)
        to_heads: Linear = self.W_query or self.W_query_up  # pyright: ignore[reportAssignmentType]
        q = rearrange(to_heads(x), "... t (n h) -> ... t n h", n=self.num_heads)
        q = constrain(q, "batch", "tokens", "heads", None)
        width = self.qk_nope_head_dim
        plain, rotated = q[..., :width], q[..., width:]
        if self.rope is not None:
            rotated = self.rope(rotated, positions)
        return jnp.concatenate([plain, rotated], axis=-1)

    def _latents(self, x: Array, positions: ArrayLike) -> Array:
        """Return what is cached of tokens, `(b, t, 1, kv_lora_rank + qk_rope_head_dim)`."""
        both = self.W_latent(x)
        latent = both[..., : self.kv_lora_rank]
        # One head: all query heads share the rotated features, and the cache has an axis of heads.
        rotated = both[..., None, self.kv_lora_rank :]
        if self.kv_norm is not None:
            latent = self.kv_norm(latent)
        if self.rope is not None:
            rotated = self.rope(rotated, positions)
        return jnp.concatenate([latent[..., None, :], rotated], axis=-1)

    @property
    def _absorption(self) -> Absorption:
        kernel = rearrange(self.W_key_value.kernel[...], "r (n h) -> r n h", n=self.num_heads)
        return Absorption(kernel, self.qk_nope_head_dim, self.dtype, self.precision)

    def _keys_and_values(self, latents: Array) -> tuple[Array, Array]:
        """Return keys and values of all heads."""
        latent = latents[..., 0, : self.kv_lora_rank]
        rotated = latents[..., self.kv_lora_rank :]
        # Keys and values of all heads come from one matrix, as in the paper.
        both = self.W_key_value(latent)
        both = rearrange(both, "... s (n h) -> ... s n h", n=self.num_heads)
        both = constrain(both, "batch", "tokens", "heads", None)
        width = self.qk_nope_head_dim
        k, v = both[..., :width], both[..., width:]
        # `spread` sums the gradient over the heads in float32, and returns that dtype.
        of_heads = *k.shape[:-1], self.qk_rope_head_dim
        rotated = spread(rotated, of_heads).astype(rotated.dtype)
        rotated = constrain(rotated, "batch", "tokens", "heads", None)
        return jnp.concatenate([k, rotated], axis=-1), v

    def work(self, t: int, s: int) -> Work:
        """Return the operations of a call of `t` queries and `s` keys, its projections included."""
        found = super().work(t, s)
        if not self._absorbs(t, s):
            # Keys and values are computed for all that is cached, not for the queries alone.
            found += products(self.W_key_value, s - t)
        return found

    def _absorbs(self, t: int, s: int) -> bool:
        """Return whether heads attend to the latents themselves."""
        return self.form == "absorbed" or (self.form == "auto" and t != s)

    def _widths(self, t: int, s: int) -> int:
        if self._absorbs(t, s):
            return 2 * self.kv_lora_rank + self.qk_rope_head_dim
        return self.head_dim + self.out_proj.kernel.shape[-2] // self.num_heads
