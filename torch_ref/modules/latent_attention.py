"""Multi-head latent attention: keys and values of all heads from one small vector a token."""

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from attn_spec.attention_checks import check_causal_window
from attn_spec.checks import check_choice, check_context_length, check_positive, check_type
from attn_spec.latent_checks import check_latent_norm
from attn_spec.module_checks import given_heads
from attn_spec.other_libraries import OF_LAYERS, names_remedies
from attn_spec.scores import Scores
from torch_ref.attention import check_backend
from torch_ref.functional.cache import KVCache
from torch_ref.functional.masks import Mask
from torch_ref.functional.outputs import Outputs
from torch_ref.functional.positions import RoPE
from torch_ref.functional.shapes import ArrayLike
from torch_ref.modules.calls import Bias, CallOptions, check_self_attention
from torch_ref.modules.dropout import Dropout
from torch_ref.modules.head_attention import HeadAttention
from torch_ref.modules.heads import Norm
from torch_ref.modules.linear import Linear

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

    Shapes:
        `(b, t, d_in)` to `(b, t, d_out)`, weights `(b, n, t, s)`; or all without b.

    Example:
        >>> layer = MultiHeadLatentAttention(
        ...     6, 6, num_heads=4, kv_lora_rank=3,
        ...     qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=5,
        ...     rope=RoPE(interleaved=True)
        ... )
        >>> found = layer.attend(torch.ones((2, 5, 6)), cache=layer.init_cache(2, 8))
        >>> found.output.shape, found.cache.key.shape, found.cache.value.numel()
        (torch.Size([2, 5, 6]), torch.Size([2, 1, 8, 5]), 0)
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
        backend: str = "auto",
    ):
        super().__init__()
        num_heads = given_heads(type(self).__name__, num_heads)
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
        self.W_query_down = None if q_lora_rank is None else Linear(d_in, q_lora_rank, qkv_bias)
        to_heads = Linear(q_lora_rank or d_in, num_heads * self.head_dim, False)
        self.W_query, self.W_query_up = (
            (to_heads, None) if q_lora_rank is None else (None, to_heads)
        )
        self.W_latent = Linear(d_in, kv_lora_rank + qk_rope_head_dim, qkv_bias)
        self.W_key_value = Linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), False)
        self.out_proj = Linear(num_heads * v_head_dim, d_out, out_bias)
        self.q_norm, self.kv_norm, self.W_gate = q_norm, kv_norm, None
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if scores.sinks else None
        self.dropout = Dropout(dropout)

    @names_remedies(OF_LAYERS)
    def attend(
        self,
        query: Float[Tensor, "*b t d_in"],
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        cache: KVCache | None = None,
        return_weights: bool = False,
        dropout_key: Tensor | None = None,
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

    def init_cache(self, b: int | None, capacity: int, dtype: torch.dtype | None = None) -> KVCache:
        """Return an empty cache of up to `capacity` tokens; see `MultiHeadAttention.init_cache`.

        `dtype` None is that of the projection to the latent.
        """
        return self._empty(b, capacity, dtype, self.W_latent)

    @property
    def _cached(self) -> tuple[int, int, int]:
        # [latent, rotated] is all that is cached.
        return 1, self.kv_lora_rank + self.qk_rope_head_dim, 0

    def _project(self, query: Tensor, positions: ArrayLike) -> tuple[Tensor, Tensor, Tensor]:
        latents = self._latents(query, positions)
        return self._queries(query, positions), latents, latents[..., :0]

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *others: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        return super()._attend(q, *self._keys_and_values(k), *others, **options)

    def _queries(self, x: Tensor, positions: ArrayLike) -> Tensor:
        """Return the queries `(b, t, n, h)`, their last features rotated."""
        if self.W_query_down is not None:
            x = self.W_query_down(x)
        if self.q_norm is not None:
            x = self.q_norm(x)
        to_heads: Linear = self.W_query or self.W_query_up  # pyright: ignore[reportAssignmentType]
        q = rearrange(to_heads(x), "... t (n h) -> ... t n h", n=self.num_heads)
        width = self.qk_nope_head_dim
        plain, rotated = q[..., :width], q[..., width:]
        if self.rope is not None:
            rotated = self.rope(rotated, positions)
        return torch.cat([plain, rotated], dim=-1)

    def _latents(self, x: Tensor, positions: ArrayLike) -> Tensor:
        """Return what is cached of tokens, `(b, t, 1, kv_lora_rank + qk_rope_head_dim)`."""
        both = self.W_latent(x)
        latent = both[..., : self.kv_lora_rank]
        # One head: all query heads share the rotated features, and the cache has an axis of heads.
        rotated = both[..., None, self.kv_lora_rank :]
        if self.kv_norm is not None:
            latent = self.kv_norm(latent)
        if self.rope is not None:
            rotated = self.rope(rotated, positions)
        return torch.cat([latent[..., None, :], rotated], dim=-1)

    def _keys_and_values(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of all heads."""
        latent = latents[..., 0, : self.kv_lora_rank]
        rotated = latents[..., self.kv_lora_rank :]
        # Keys and values of all heads come from one matrix, as in the paper.
        both = self.W_key_value(latent)
        both = rearrange(both, "... s (n h) -> ... s n h", n=self.num_heads)
        width = self.qk_nope_head_dim
        k, v = both[..., :width], both[..., width:]
        rotated = rotated.expand(*k.shape[:-1], -1)
        return torch.cat([k, rotated], dim=-1), v
