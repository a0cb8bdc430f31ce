"""Attention in heads: the steps between the input projections and the output projection."""

from typing import Any

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from attn_spec.cache_checks import check_cache_window, check_capacity
from attn_spec.checks import check_tokens, check_type
from attn_spec.scores import Scores
from flax_attn.attention import attend
from flax_attn.functional.cache import KVCache
from flax_attn.functional.masks import Mask, as_mask
from flax_attn.functional.outputs import Outputs
from flax_attn.functional.padding import check_known_lengths
from flax_attn.functional.score_function import placed_score
from flax_attn.functional.shapes import ArrayLike
from flax_attn.modules.calls import Attention, Bias
from flax_attn.modules.dropout import Dropout
from flax_attn.modules.heads import gate_heads
from flax_attn.modules.linear import Linear
from flax_attn.modules.quantized_linear import QuantizedLinear
from flax_attn.modules.work import Work, count_pairs, products
from flax_attn.sharding.axes import constrain
from flax_attn.sharding.zigzag_inputs import arranged


class HeadAttention(Attention):
    """Attention in heads; a base class of `MultiHeadAttention` and `MultiHeadLatentAttention`.

    A subclass has these attributes and a method `_project`, which maps the inputs of a call and
    their positions to queries and to the keys and values that are cached.

    Attributes:
        num_heads: number of query heads.
        head_dim: width of a query.
        causal: whether a token attends only to itself and to the tokens before it.
        scores: scale, soft cap, sinks and function of the scores.
        sinks: parameter of the attention sinks; None is no sinks.
        W_gate: projection to the gate of the heads; None is no gate.
        out_proj: projection of the joined heads to the output.
        dropout: dropout of the weights.
        precision: precision of the matrix products, as in `jax.lax.dot_general`.
        backend: name of an attention backend, or `"auto"`.

    Example:
        >>> from flax_attn import MultiHeadAttention
        >>> rngs = nnx.Rngs(0)
        >>> layer = MultiHeadAttention(6, 8, num_heads=4, rngs=rngs)
        >>> layer.num_heads, layer.head_dim, layer.causal
        (4, 2, True)
    """

    num_heads: int
    head_dim: int
    causal: bool
    scores: Scores
    sinks: nnx.Param | None
    W_gate: Linear | None
    out_proj: Linear
    dropout: Dropout
    precision: PrecisionLike
    backend: str

    def _project(self, *inputs: Any, **options: Any) -> tuple[Array, Array, Array]:
        raise NotImplementedError

    @property
    def _cached(self) -> tuple[int, int, int]:
        """The number of heads that are cached, and the widths of their keys and values."""
        raise NotImplementedError

    def _run(
        self,
        *inputs: Array | None,
        mask: Mask | Array | None,
        bias: Bias | None,
        positions: ArrayLike | None,
        lengths: ArrayLike | int | None,
        cache: KVCache | None,
        return_weights: bool,
        dropout_key: Array | None,
    ) -> Outputs[KVCache]:
        """Return the outputs of a call; the first input is that of the queries."""
        query: Any = inputs[0]
        check_tokens("query", query, "d_in", self.d_in, self.context_length)
        if cache is not None:
            check_type("cache", cache, KVCache, "what init_cache of this layer returns")
            cache.check_heads(query.shape[:-2], *self._cached)
            check_cache_window(cache.window, self.window)
        *batch, t, _ = query.shape
        check_known_lengths(lengths, batch[0] if batch else 1, t)
        if cache is None:
            query_positions = jnp.arange(t)
            # On a mesh tokens may arrive in zigzag order.
            arrived = arranged(query_positions)
        else:
            arrived = query_positions = cache.positions(t, lengths)
        q, k, v = self._project(*inputs, arrived if positions is None else positions)
        mask = self._mask(mask)
        if cache is not None:
            k, v, mask, key_positions, cache = cache.extend(k, v, mask, lengths)
            cache = _divided(cache)
        else:
            key_positions = jnp.arange(k.shape[-3])
            if lengths is not None:
                mask &= Mask.lengths(query=lengths, key=lengths)
        # The bias has the keys in their own order, as a mask has.
        if callable(bias):
            bias = bias(arrived, key_positions)
        score = placed_score(self.scores, query_positions, key_positions)
        dropout = self.dropout.keyed(dropout_key)
        options = {"score": score, "dropout": dropout, "return_weights": return_weights}
        context, weights = self._attend(q, k, v, bias, mask, **options)
        # What was computed for a row that got impossible lengths is wrong.
        if cache is not None:
            context = jnp.where(cache.invalid[..., None, None, None], jnp.nan, context)
        context = constrain(context, "batch", "tokens", "heads", None)
        if self.W_gate is not None:
            context = gate_heads(self.W_gate(query), context)
        joined = rearrange(context, "... t n h -> ... t (n h)")
        # The name is for `jax.checkpoint`, which may keep this and compute the rest again.
        output = checkpoint_name(self.out_proj(joined), "output")
        return Outputs(output, weights, cache)

    def _attend(
        self, q: Array, k: Array, v: Array, *others: Any, return_weights: bool, **options: Any
    ) -> tuple[Array, Array | None]:
        scale = self.scores.scale
        if scale is None:
            # Not left to the call: a latent layer attends to keys that are wider than a head.
            scale = self.head_dim**-0.5
        found = attend(
            *(q, k, v, *others),
            scale=scale,
            soft_cap=self.scores.soft_cap,
            sinks=None if self.sinks is None else self.sinks[...],
            precision=self.precision,
            backend=self.backend,
            return_weights=return_weights,
            **options,
        )
        return found.output, found.weights

    def _mask(self, mask: Mask | Array | None) -> Mask:
        own = Mask.causal() if self.window is None else Mask.sliding_window(self.window)
        return (own if self.causal else Mask()) & as_mask(mask).sized(None, self.num_heads)

    def _empty(
        self, b: int | None, capacity: int, dtype: Dtype | None, layer: Linear | QuantizedLinear
    ) -> KVCache:
        """Return an empty cache for these heads, by default in the dtype of a projection."""
        if self.window is None:
            check_capacity(capacity, self.context_length)
        *sizes, value_dim = self._cached
        if dtype is None:
            dtype = layer.result_dtype
        options = {"value_dim": value_dim, "window": self.window, "dtype": dtype}
        cache = KVCache.zeros(b, capacity, *sizes, **options)
        return _divided(cache)

    def work(self, t: int, s: int) -> Work:
        """Return the operations of a call of `t` queries and `s` keys, its projections included."""
        pairs = count_pairs(t, s, self.window) if self.causal else t * s
        return products(self, t) + Work(attention=2 * pairs * self.num_heads * self._widths(t, s))

    def _widths(self, t: int, s: int) -> int:
        """Return the width of a key and of a value together, as a head multiplies them."""
        return 2 * self.head_dim


def _divided(cache: KVCache) -> KVCache:
    """Return a cache that is split over the mesh in use, its capacity as tokens are."""
    key, value = (
        constrain(x, "batch", "kv_heads", "tokens", None) for x in (cache.key, cache.value)
    )
    return cache.replace(key=key, value=value)
