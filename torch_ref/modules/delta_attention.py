"""The base class of attention by the gated delta rule."""

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from attn_spec.checks import check_positive, check_tokens, check_type
from attn_spec.recurrent_checks import check_recurrent_heads, check_recurrent_options
from torch_ref.functional.delta_cache import DeltaCache, documents_of
from torch_ref.functional.delta_rule import gated_delta_rule
from torch_ref.functional.dtypes import accumulation_dtype
from torch_ref.functional.masks import Mask, as_mask
from torch_ref.functional.outputs import Outputs
from torch_ref.functional.padding import check_known_lengths, real_tokens
from torch_ref.functional.shapes import ArrayLike, Tokens
from torch_ref.modules.calls import Attention
from torch_ref.modules.linear import Linear
from torch_ref.modules.norm import RMSNorm
from torch_ref.modules.short_convolution import ShortConvolution


class DeltaAttention(Attention):
    """Base class of attention by the gated delta rule.

        q, k, v = silu(conv(x W_query)), silu(conv(x W_key)), silu(conv(x W_value))
        o = gated_delta_rule(q / |q|, k / |k|, v, decay(x), beta=sigmoid(x W_beta))
        out_proj(norm(o) * gate(x))

    A subclass defines `create_parts`, `decay` and `gate`, as `GatedDeltaNet` and
    `KimiDeltaAttention` do. The norm is an `RMSNorm` over each head.

    Shapes:
        `(t, d_in)` to `(t, d_out)` or `(b, t, d_in)` to `(b, t, d_out)`.

    Example:
        >>> class DeltaNet(DeltaAttention):
        ...     def create_parts(self):
        ...         pass
        ...     def decay(self, x):
        ...         return torch.zeros((*x.shape[:-1], self.num_heads))
        ...     def gate(self, x):
        ...         return torch.ones((*x.shape[:-1], self.num_heads, self.value_dim))
        >>> DeltaNet(6, 6, num_heads=2, head_dim=4)(torch.ones((2, 5, 6))).shape
        torch.Size([2, 5, 6])
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        num_heads: int,
        head_dim: int,
        *,
        num_key_heads: int | None = None,
        value_dim: int | None = None,
        kernel_size: int = 4,
        eps: float = 1e-6,
    ):
        super().__init__()
        # Defaults first: the checks name the values that are used.
        num_key_heads = num_heads if num_key_heads is None else num_key_heads
        value_dim = head_dim if value_dim is None else value_dim
        check_positive(d_in=d_in, d_out=d_out, num_heads=num_heads, num_key_heads=num_key_heads)
        check_positive(head_dim=head_dim, value_dim=value_dim)
        check_recurrent_heads(num_heads, num_key_heads)
        self.d_in, self.d_out, self.kernel_size = d_in, d_out, kernel_size
        self.num_heads, self.num_key_heads, self.head_dim, self.value_dim = (
            num_heads,
            num_key_heads,
            head_dim,
            value_dim,
        )
        keys, values = num_key_heads * head_dim, num_heads * value_dim
        self.W_query = Linear(d_in, keys, False)
        self.W_key = Linear(d_in, keys, False)
        self.W_value = Linear(d_in, values, False)
        self.W_beta = Linear(d_in, num_heads, False)
        self.conv_query = ShortConvolution(keys, kernel_size)
        self.conv_key = ShortConvolution(keys, kernel_size)
        self.conv_value = ShortConvolution(values, kernel_size)
        # Over each head: the state has no softmax that would bound what is read from it.
        self.norm = RMSNorm(value_dim, eps)
        self.out_proj = Linear(values, d_out, False)
        self.create_parts()

    def create_parts(self) -> None:
        """Create the layers of `decay` and `gate`."""
        raise NotImplementedError

    def decay(self, x: Tokens) -> Tensor:
        """Return the logarithms of decays, `(b, t, n)` or `(b, t, n, h)`."""
        raise NotImplementedError

    def gate(self, x: Tokens) -> Float[Tensor, "b t n v"]:
        """Return the factor on the output of the heads."""
        raise NotImplementedError

    def beta(self, x: Tokens) -> Float[Tensor, "b t n"]:
        """Return how much of the old value of a key is replaced, in at least float32."""
        beta = self.W_beta(x)
        return beta.to(accumulation_dtype(beta.dtype)).sigmoid()

    def attend(
        self,
        query: Tokens,
        *,
        mask: Mask | Tensor | None = None,
        lengths: ArrayLike | int | None = None,
        cache: DeltaCache | None = None,
        **options: Any,
    ) -> Outputs[DeltaCache]:
        """Return the output, with the new cache if there is a cache."""
        check_tokens("query", query, "d_in", self.d_in, self.context_length)
        check_recurrent_options(options)
        if cache is not None:
            check_type("cache", cache, DeltaCache, "what init_cache of this layer returns")
            b = len(query) if query.ndim == 3 else None
            wanted = DeltaCache.shapes(b, **self._cached)
            cache.check_shapes(wanted)
        # A sequence is computed as a batch of one.
        single = query.ndim == 2
        if single:
            query = query[None]
            cache = _each(cache, lambda x: x[None])
        output, cache = self._attend(query, as_mask(mask), lengths, cache)
        if single:
            output = output[0]
            cache = _each(cache, lambda x: x[0])
        return Outputs(output, cache=cache)

    def init_cache(
        self, b: int | None, capacity: int, dtype: torch.dtype | None = None
    ) -> DeltaCache:
        """Return an empty cache for `b` sequences.

        With `b` None it holds one sequence, without a batch axis. Its size does not depend on
        `capacity`. `dtype` is that of the inputs of the convolutions; None is that of the key
        projection.
        """
        own = self.W_key.result_dtype
        device = self.W_key.weight.device
        numerics = {"dtype": own if dtype is None else dtype, "device": device}
        return DeltaCache.zeros(b, **self._cached, **numerics)

    @property
    def _cached(self) -> dict[str, int]:
        names = ("kernel_size", "num_heads", "head_dim", "value_dim", "num_key_heads")
        return {name: getattr(self, name) for name in names}

    def _attend(
        self, x: Tensor, mask: Mask, lengths: ArrayLike | int | None, cache: DeltaCache | None
    ) -> tuple[Tensor, DeltaCache | None]:
        b, t, _ = x.shape
        check_known_lengths(lengths, b, t)
        if cache is None:
            order = torch.arange(t, device=x.device).expand(b, t)
        else:
            order = cache.positions(t)
        # A state forgets at the start of a document: a mask that says more cannot be honoured.
        starts, lengths = documents_of(mask, order, lengths)
        after = 0
        before = (None, None, None, None)
        if cache is not None:
            after, lengths = cache.count(t, lengths)
            before = tuple(cache.arrays.values())
        if lengths is not None:
            # Padding must not reach the convolutions, which see tokens before their own.
            x = torch.where(real_tokens(b, t, lengths, x.device)[..., None], x, 0)
        options = {"starts": starts, "lengths": lengths}
        query, last_query = self.conv_query(self.W_query(x), before[0], **options)
        key, last_key = self.conv_key(self.W_key(x), before[1], **options)
        value, last_value = self.conv_value(self.W_value(x), before[2], **options)
        query = rearrange(query, "b t (k h) -> b t k h", h=self.head_dim)
        key = rearrange(key, "b t (k h) -> b t k h", h=self.head_dim)
        value = rearrange(value, "b t (n v) -> b t n v", v=self.value_dim)
        tokens = _unit(query), _unit(key), value, self.decay(x), self.beta(x)
        found = gated_delta_rule(*tokens, state=before[3], **options)
        context = self._gated(found.output, x)
        if cache is not None:
            cache = DeltaCache(last_query, last_key, last_value, found.state, after)
            # Numbers behind a cache that overflowed would be wrong, which is not to be missed.
            context = torch.where(cache.invalid[:, None, None, None], torch.nan, context)
        joined = rearrange(context, "b t n v -> b t (n v)")
        return self.out_proj(joined), cache

    def _gated(self, heads: Tensor, x: Tensor) -> Tensor:
        return self.norm(heads) * self.gate(x)


def _unit(x: Tensor) -> Tensor:
    """Return `x / sqrt(sum(x^2) + 1e-6)` over the last axis."""
    y = x.to(accumulation_dtype(x.dtype))
    squares = y.square().sum(dim=-1, keepdim=True)
    return (y * torch.rsqrt(squares + 1e-6)).to(x.dtype)


def _each(cache: DeltaCache | None, change: Callable[[Tensor], Tensor]) -> DeltaCache | None:
    """Return a cache with every tensor changed, and None for none."""
    if cache is None:
        return None
    # A length that is an integer is that of all rows.
    length = cache.length if isinstance(cache.length, int) else change(cache.length)
    arrays = {name: change(x) for name, x in cache.arrays.items()}
    return cache.replace(**arrays, length=length)
