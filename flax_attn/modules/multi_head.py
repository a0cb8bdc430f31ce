"""Multi-head, grouped-query and multi-query attention; self or cross; causal or not."""

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Float

from attn_spec.attention_checks import check_causal_window
from attn_spec.checks import (
    check_choice,
    check_context_length,
    check_positive,
    check_tokens,
    check_type,
)
from attn_spec.module_checks import check_head_norm, check_heads, given_heads
from attn_spec.other_libraries import OF_CONSTRUCTORS, OF_LAYERS, names_remedies
from attn_spec.scores import Scores
from flax_attn.backends.registry import check_backend
from flax_attn.functional.cache import KVCache
from flax_attn.functional.masks import Mask
from flax_attn.functional.outputs import Outputs
from flax_attn.functional.positions import RoPE
from flax_attn.functional.shapes import ArrayLike
from flax_attn.modules.calls import Bias, CallOptions, check_self_attention
from flax_attn.modules.dropout import Dropout
from flax_attn.modules.head_attention import HeadAttention
from flax_attn.modules.heads import GATES, Norm, norm_heads
from flax_attn.modules.initialisation import filled
from flax_attn.modules.linear import Linear
from flax_attn.sharding.axes import constrain
from flax_attn.sharding.parameters import named


class MultiHeadAttention(HeadAttention):
    """Attention in `num_heads` heads of width h, joined by an output projection.

        out_proj(concat_i(dropout(softmax(mask(q_i k_j^T / sqrt(h)))) v_j))
        with j = i // (num_heads / num_kv_heads)

    With `causal=False` and three inputs it is the layer of "Attention Is All You Need". With `rope`
    the product is `(R_t q_i) (R_s k_j)^T`, query and key rotated by their positions, as in Llama.
    `scores` sets the scale, a soft cap, attention sinks or a function of each score; `q_norm` and
    `k_norm` are norms of queries and keys; `output_gate` is a factor on the output of the heads.

    Args:
        d_in: width of the query input.
        d_out: width of all query heads together, and of the output.
        context_length: maximum length of the query and key inputs; None is no limit.
        dropout: the probability that a weight is dropped in train mode.
        num_heads: number of query heads, which has to be given; divides d_out unless `head_dim` is
            given.
        qkv_bias: whether the three input projections have a bias.
        num_kv_heads: number of key/value heads; divides num_heads. None is num_heads (multi-head),
            fewer is grouped-query, 1 is multi-query attention.
        head_dim: width h of a head; None is `d_out / num_heads`.
        kdim: width of the key input; None is d_in.
        vdim: width of the value input; None is d_in.
        out_bias: whether the output projection has a bias.
        causal: whether a token attends only to itself and to the tokens before it.
        window: number of keys that a token attends to, itself included; None is all. It needs
            `causal`.
        rope: rotary positions of queries and keys, for self-attention; None is no rotation.
        q_norm: norm of the queries before the rotation, as wide as a head or as all heads together;
            None is no norm.
        k_norm: norm of the keys, likewise.
        output_gate: `"heads"` or `"features"`: what a head returns, or each feature of it, is
            multiplied by `sigmoid(W_gate(query))`; None is no gate. `W_gate` has a bias where the
            input projections have.
        scores: scale, soft cap, sinks and function of the scores.
        dtype: dtype of the computation; None promotes the dtypes of the input and the parameters.
        param_dtype: dtype of the parameters.
        precision: precision of the matrix products, as in `jax.lax.dot_general`.
        backend: name of an attention backend, or `"auto"`.
        rngs: random streams; parameters are drawn from `params`, with the distribution of
            `torch.nn.Linear`, and the keys of dropout from `dropout`.

    Shapes:
        query `(b, t, d_in)`, key `(b, s, kdim)`, value `(b, s, vdim)` to `(b, t, d_out)`, weights
        `(b, n, t, s)`; or all without b.

    Raises:
        ValueError: if the heads do not divide, a size is not positive, `dropout` lies outside [0,
            1), `rope` or a norm does not fit the heads, there is a window without `causal`, gate or
            backend is unknown or `rngs` is missing; in the call, if an input has another rank or
            width or is longer than `context_length`, if the module is causal and t != s, if mask,
            bias or positions do not fit, if there is a key beside `rope` or a cache, or positions
            without `rope`, or if more tokens come in one call than the cache can hold. A row whose
            tokens fill the cache over several calls becomes NaN: see `init_cache`.

    Example:
        >>> layer = MultiHeadAttention(6, 8, num_heads=4, num_kv_heads=2, rngs=nnx.Rngs(0))
        >>> attended = layer.attend(jnp.ones((3, 5, 6)), return_weights=True)
        >>> attended.output.shape, attended.weights.shape
        ((3, 5, 8), (3, 4, 5, 5))

    References:
        Vaswani et al. 2017 (arXiv:1706.03762); Shazeer 2019, multi-query (arXiv:1911.02150);
        Ainslie et al. 2023, grouped-query (arXiv:2305.13245); Henry et al. 2020, norms of queries
        and keys (arXiv:2010.04245); Qiu et al. 2025, gated outputs (arXiv:2505.06708).
    """

    @names_remedies(OF_CONSTRUCTORS)
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
        kdim: int | None = None,
        vdim: int | None = None,
        out_bias: bool = True,
        causal: bool = True,
        window: int | None = None,
        rope: RoPE | None = None,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        scores: Scores = Scores(),  # noqa: B008 (frozen)
        output_gate: str | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        backend: str = "auto",
        rngs: nnx.Rngs | None = None,
    ):
        num_heads = given_heads(type(self).__name__, num_heads)
        # Defaults first: the checks name the values that are used.
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        kdim, vdim = d_in if kdim is None else kdim, d_in if vdim is None else vdim
        check_heads(d_out, num_heads, num_kv_heads, head_dim)
        check_positive(d_in=d_in, kdim=kdim, vdim=vdim)
        check_context_length(context_length)
        check_causal_window(window, causal)
        check_backend(backend)
        check_type("rope", rope, RoPE | None, "rope=RoPE(), or None")
        check_type("scores", scores, Scores, "scores=Scores(soft_cap=50.0)")
        head_dim = d_out // num_heads if head_dim is None else head_dim
        # It rotates features in pairs, and may rotate a part of a head alone.
        if rope is not None:
            rope.check_head_dim(head_dim)
        for name, norm, heads in (("q_norm", q_norm, num_heads), ("k_norm", k_norm, num_kv_heads)):
            if norm is not None:
                check_head_norm(name, getattr(norm, "d_model", None), head_dim, heads)
        # A gate a feature, as in Qwen3-Next, or one a head.
        if output_gate is not None:
            check_choice("output_gate", output_gate, GATES)
        self.d_in, self.d_out, self.kdim, self.vdim = d_in, d_out, kdim, vdim
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.context_length, self.causal, self.window = context_length, causal, window
        self.rope, self.scores, self.output_gate = rope, scores, output_gate
        self.dtype, self.precision, self.backend = dtype, precision, backend
        numerics = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "rngs": rngs,
        }
        of_query = {"axes": ("embed", "heads"), "unit": (1, head_dim), **numerics}
        of_key = {**of_query, "axes": ("embed", "kv_heads")}
        of_output = {**of_query, "axes": ("heads", "embed"), "unit": (head_dim, 1)}
        self.W_query = Linear(d_in, num_heads * head_dim, qkv_bias, **of_query)
        self.W_key = Linear(kdim, num_kv_heads * head_dim, qkv_bias, **of_key)
        self.W_value = Linear(vdim, num_kv_heads * head_dim, qkv_bias, **of_key)
        self.out_proj = Linear(num_heads * head_dim, d_out, out_bias, **of_output)
        gates = num_heads * head_dim if output_gate == "features" else num_heads
        of_gate = {**of_query, "unit": (1, gates // num_heads)}
        self.W_gate = None if output_gate is None else Linear(d_in, gates, qkv_bias, **of_gate)
        self.q_norm, self.k_norm = q_norm, k_norm
        sinks = filled(num_heads, 0, param_dtype) if scores.sinks else None
        self.sinks = None if sinks is None else nnx.Param(sinks, **named("heads"))
        self.dropout = Dropout(dropout, rngs=rngs)

    @names_remedies(OF_LAYERS)
    def attend(
        self,
        query: Float[Array, "*b t d_in"],
        key: Float[Array, "*b s kdim"] | None = None,
        value: Float[Array, "*b s vdim"] | None = None,
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

        Args:
            query: input that queries are projected from.
            key: input that keys are projected from; None is the query (self-attention).
            value: input that values are projected from; None is the key.
            mask: a `Mask`, or a boolean array that broadcasts to `(b, n, t, s)`, True = attend;
                hides more than `causal` does. With a cache it is that of the whole sequence, the
                same in every call.
            bias: term added to the scaled scores, which broadcasts to `(b, n, t, s)`; or a function
                that returns it for the positions of queries and keys in their sequences, integers
                `(b, t)` and `(b, s)`, such as `lambda query, key: alibi(num_heads, query, key)`.
            positions: integers `(t,)` or `(b, t)` that `rope` rotates by; None is the order of the
                tokens. They hide nothing: causality follows the order, and packed sequences are
                kept apart by the mask.
            lengths: number of real tokens in each row, `(b,)`; the rest is padding. None is all.
                Take it for sequences that are padded at the end: the heads return 0 for padding.
                `mask=Mask.lengths(key=lengths)` hides the same keys, but lets the tokens of
                padding attend; take it where the key is another sequence.
            cache: keys and values of the tokens before, from `init_cache`; the new ones are stored
                behind them.
            return_weights: whether to return the weights too; the output is the same, bit for bit.
            dropout_key: key that decides what is dropped in train mode; None draws one from the
                `dropout` stream.
        """
        check_self_attention(self.rope, query, key, positions, cache)
        options: CallOptions = {
            "mask": mask,
            "bias": bias,
            "positions": positions,
            "lengths": lengths,
            "dropout_key": dropout_key,
        }
        return self._run(query, key, value, cache=cache, return_weights=return_weights, **options)

    @names_remedies(OF_LAYERS)
    def __call__(
        self,
        query: Float[Array, "*b t d_in"],
        key: Float[Array, "*b s kdim"] | None = None,
        value: Float[Array, "*b s vdim"] | None = None,
        *,
        mask: Mask | Array | None = None,
        bias: Bias | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        dropout_key: Array | None = None,
    ) -> Array:
        """Return the output of `attend`, which describes the arguments."""
        options: CallOptions = {
            "mask": mask,
            "bias": bias,
            "positions": positions,
            "lengths": lengths,
            "dropout_key": dropout_key,
        }
        return self.attend(query, key, value, **options).output

    def init_cache(self, b: int | None, capacity: int, dtype: Dtype | None = None) -> KVCache:
        """Return an empty cache for `b` sequences of up to `capacity` tokens.

        With `b` None it holds one sequence, without a batch axis. With a `window` it is a ring
        buffer: it keeps the last `capacity` tokens, and sequences have no end. `dtype` None is that
        of the key projection.

        The lengths of a cache are arrays after the first call, and are not read. So a row whose
        tokens do not fit raises no error: its outputs are NaN, its length is -1, and
        `cache.invalid` is True.

        Raises:
            ValueError: if the capacity is beyond `context_length`, or less than the window.
        """
        return self._empty(b, capacity, dtype, self.W_key)

    @property
    def _cached(self) -> tuple[int, int, int]:
        return self.num_kv_heads, self.head_dim, self.head_dim

    def _project(
        self, query: Array, key: Array | None, value: Array | None, positions: ArrayLike
    ) -> tuple[Array, Array, Array]:
        # Self-attention names its input once; keys of another sequence are its values, too.
        key = query if key is None else key
        value = key if value is None else value
        check_tokens("key", key, "kdim", self.kdim, self.context_length)
        check_tokens("value", value, "vdim", self.vdim, self.context_length)
        q, k, v = self.W_query(query), self.W_key(key), self.W_value(value)
        q = rearrange(q, "... t (n h) -> ... t n h", n=self.num_heads)
        k = rearrange(k, "... s (k h) -> ... s k h", k=self.num_kv_heads)
        v = rearrange(v, "... s (k h) -> ... s k h", k=self.num_kv_heads)
        q = constrain(q, "batch", "tokens", "heads", None)
        k = constrain(k, "batch", "tokens", "kv_heads", None)
        v = constrain(v, "batch", "tokens", "kv_heads", None)
        # Before the rotation, which keeps lengths: a norm does not depend on the place of a token.
        q = norm_heads(self.q_norm, q)
        k = norm_heads(self.k_norm, k)
        if self.rope is not None:
            q = self.rope(q, positions)
            k = self.rope(k, positions)
        return q, k, v
