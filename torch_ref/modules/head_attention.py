"""Attention in heads: the steps between the input projections and the output projection."""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from attn_spec.cache_checks import check_cache_window, check_capacity
from attn_spec.checks import check_tokens, check_type
from attn_spec.scores import Scores
from torch_ref.attention import attend
from torch_ref.functional.cache import KVCache
from torch_ref.functional.masks import Mask, as_mask
from torch_ref.functional.outputs import Outputs
from torch_ref.functional.padding import check_known_lengths
from torch_ref.functional.score_function import placed_score
from torch_ref.functional.shapes import ArrayLike
from torch_ref.functional.tags import checkpoint_name
from torch_ref.modules.calls import Attention, Bias
from torch_ref.modules.dropout import Dropout
from torch_ref.modules.heads import gate_heads
from torch_ref.modules.linear import Linear
from torch_ref.modules.quantized_linear import QuantizedLinear


class HeadAttention(Attention):
    """Attention in heads; a base class of `MultiHeadAttention` and `MultiHeadLatentAttention`.

    A subclass has these attributes and a method `_project`, which maps the inputs of a call and
    their positions to queries and to the keys and values that are cached.

    Example:
        >>> from torch_ref import MultiHeadAttention
        >>> layer = MultiHeadAttention(6, 8, num_heads=4)
        >>> layer.num_heads, layer.head_dim, layer.causal
        (4, 2, True)
    """

    num_heads: int
    head_dim: int
    causal: bool
    scores: Scores
    sinks: nn.Parameter | None
    W_gate: Linear | None
    out_proj: Linear
    dropout: Dropout
    backend: str

    def _project(self, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    @property
    def _cached(self) -> tuple[int, int, int]:
        """The number of heads that are cached, and the widths of their keys and values."""
        raise NotImplementedError

    def _run(
        self,
        *inputs: Tensor | None,
        mask: Mask | Tensor | None,
        bias: Bias | None,
        positions: ArrayLike | None,
        lengths: ArrayLike | int | None,
        cache: KVCache | None,
        return_weights: bool,
        dropout_key: Tensor | None,
    ) -> Outputs[KVCache]:
        """Return the outputs of a call; the first input is that of the queries."""
        query: Any = inputs[0]
        check_tokens("query", query, "d_in", self.d_in, self.context_length)
        if cache is not None:
            check_type("cache", cache, KVCache, "what init_cache of this layer returns")
            cache.check_heads(tuple(query.shape[:-2]), *self._cached)
            check_cache_window(cache.window, self.window)
        *batch, t, _ = query.shape
        check_known_lengths(lengths, batch[0] if batch else 1, t)
        if cache is None:
            query_positions = torch.arange(t, device=query.device)
        else:
            query_positions = cache.positions(t, lengths)
        q, k, v = self._project(*inputs, query_positions if positions is None else positions)
        mask = self._mask(mask)
        if cache is not None:
            k, v, mask, key_positions, cache = cache.extend(k, v, mask, lengths)
        else:
            key_positions = torch.arange(k.shape[-3], device=k.device)
            if lengths is not None:
                mask &= Mask.lengths(query=lengths, key=lengths)
        if callable(bias):
            bias = bias(query_positions, key_positions)
        score = placed_score(self.scores, query_positions, key_positions)
        dropout = self.dropout.keyed(dropout_key)
        options = {"score": score, "dropout": dropout, "return_weights": return_weights}
        context, weights = self._attend(q, k, v, bias, mask, **options)
        # What was computed for a row that got impossible lengths is wrong.
        if cache is not None:
            context = torch.where(cache.invalid[..., None, None, None], torch.nan, context)
        if self.W_gate is not None:
            context = gate_heads(self.W_gate(query), context)
        joined = rearrange(context, "... t n h -> ... t (n h)")
        # The name is for checkpointing, which may keep this and compute the rest again.
        output = checkpoint_name(self.out_proj(joined), "output")
        return Outputs(output, weights, cache)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *others: Any, return_weights: bool, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        scale = self.scores.scale
        if scale is None:
            scale = self.head_dim**-0.5
        found = attend(
            *(q, k, v, *others),
            scale=scale,
            soft_cap=self.scores.soft_cap,
            sinks=self.sinks,
            backend=self.backend,
            return_weights=return_weights,
            **options,
        )
        return found.output, found.weights

    def _mask(self, mask: Mask | Tensor | None) -> Mask:
        own = Mask.causal() if self.window is None else Mask.sliding_window(self.window)
        return (own if self.causal else Mask()) & as_mask(mask).sized(None, self.num_heads)

    def _empty(
        self,
        b: int | None,
        capacity: int,
        dtype: torch.dtype | None,
        layer: Linear | QuantizedLinear,
    ) -> KVCache:
        """Return an empty cache for these heads, by default in the dtype of a projection."""
        if self.window is None:
            check_capacity(capacity, self.context_length)
        *sizes, value_dim = self._cached
        if dtype is None:
            dtype = layer.result_dtype
        options = {"value_dim": value_dim, "window": self.window, "dtype": dtype}
        return KVCache.zeros(b, capacity, *sizes, **options, device=layer.weight.device)
