"""The base class of attention by the gated delta rule."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Float

from attn_spec.checks import check_positive, check_tokens, check_type
from attn_spec.recurrent_checks import check_recurrent_heads, check_recurrent_options
from flax_attn.functional.delta_cache import DeltaCache, documents_of
from flax_attn.functional.delta_rule import gated_delta_rule
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.masks import Mask, as_mask
from flax_attn.functional.outputs import Outputs
from flax_attn.functional.padding import check_known_lengths, real_tokens
from flax_attn.functional.shapes import ArrayLike, Tokens
from flax_attn.modules.calls import Attention
from flax_attn.modules.linear import Linear
from flax_attn.modules.norm import RMSNorm
from flax_attn.modules.short_convolution import ShortConvolution
from flax_attn.modules.work import Work, products
from flax_attn.sharding.axes import constrain
from flax_attn.sharding.heads import by_rows_and_heads


class DeltaAttention(Attention):
    """Base class of attention by the gated delta rule.

        q, k, v = silu(conv(x W_query)), silu(conv(x W_key)), silu(conv(x W_value))
        o = gated_delta_rule(q / |q|, k / |k|, v, decay(x), beta=sigmoid(x W_beta))
        out_proj(norm(o) * gate(x))

    A subclass defines `create_parts`, `decay` and `gate`, as `GatedDeltaNet` and
    `KimiDeltaAttention` do. The norm is an `RMSNorm` over each head.

    Args:
        d_in: width of the input.
        d_out: width of the output.
        num_heads: number of heads of values, and of states.
        head_dim: width h of a head of queries and keys.
        num_key_heads: number of heads of queries and keys; divides num_heads. None is num_heads.
        value_dim: width v of a head of values; None is head_dim.
        kernel_size: kernel size of the convolutions.
        eps: epsilon of the norm.
        dtype: dtype of the computation; None promotes the dtypes of the input and the parameters.
        param_dtype: dtype of the parameters.
        precision: precision of the matrix products, as in `jax.lax.dot_general`.
        rngs: random streams; parameters are drawn from `params`.

    Shapes:
        `(t, d_in)` to `(t, d_out)` or `(b, t, d_in)` to `(b, t, d_out)`.

    Raises:
        ValueError: if a size is not positive, or the heads of keys do not divide those of values;
            in the call, if the input has another rank or width, if the mask is more than causal,
            segments and lengths, or if the call asks for weights, a bias or positions, which a
            state has not.

    Example:
        >>> class DeltaNet(DeltaAttention):
        ...     def create_parts(self, **numerics):
        ...         pass
        ...     def decay(self, x):
        ...         return jnp.zeros((*x.shape[:-1], self.num_heads))
        ...     def gate(self, x):
        ...         return jnp.ones((*x.shape[:-1], self.num_heads, self.value_dim))
        >>> DeltaNet(6, 6, num_heads=2, head_dim=4, rngs=nnx.Rngs(0))(jnp.ones((2, 5, 6))).shape
        (2, 5, 6)

    References:
        Yang et al. 2024, DeltaNet (arXiv:2406.06484).
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
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        rngs: nnx.Rngs,
    ):
        # Defaults first: the checks name the values that are used.
        num_key_heads = num_heads if num_key_heads is None else num_key_heads
        value_dim = head_dim if value_dim is None else value_dim
        check_positive(d_in=d_in, d_out=d_out, num_heads=num_heads, num_key_heads=num_key_heads)
        check_positive(head_dim=head_dim, value_dim=value_dim)
        check_recurrent_heads(num_heads, num_key_heads)
        self.d_in, self.d_out, self.kernel_size = d_in, d_out, kernel_size
        self.num_heads, self.num_key_heads = num_heads, num_key_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.dtype, self.precision = dtype, precision
        numerics = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        products = {"precision": precision, **numerics}
        keys, values = num_key_heads * head_dim, num_heads * value_dim
        of_key = {"axes": ("embed", "kv_heads"), "unit": (1, head_dim)}
        of_value = {"axes": ("embed", "heads"), "unit": (1, value_dim)}
        self.W_query = Linear(d_in, keys, False, **of_key, **products)
        self.W_key = Linear(d_in, keys, False, **of_key, **products)
        self.W_value = Linear(d_in, values, False, **of_value, **products)
        self.W_beta = Linear(d_in, num_heads, False, axes=("embed", "heads"), **products)
        of_key["axes"], of_value["axes"] = (None, "kv_heads"), (None, "heads")
        self.conv_query = ShortConvolution(keys, kernel_size, **of_key, **numerics)
        self.conv_key = ShortConvolution(keys, kernel_size, **of_key, **numerics)
        self.conv_value = ShortConvolution(values, kernel_size, **of_value, **numerics)
        # Over each head: the state has no softmax that would bound what is read from it.
        self.norm = RMSNorm(value_dim, eps, dtype=dtype, param_dtype=param_dtype)
        self.out_proj = Linear(
            values, d_out, False, axes=("heads", "embed"), unit=(value_dim, 1), **products
        )
        self.create_parts(**products)

    def create_parts(self, **numerics: Any) -> None:
        """Create the layers of `decay` and `gate`; `numerics` are arguments of a `Linear`."""
        raise NotImplementedError

    def decay(self, x: Tokens) -> Array:
        """Return the logarithms of decays, `(b, t, n)` or `(b, t, n, h)`."""
        raise NotImplementedError

    def gate(self, x: Tokens) -> Float[Array, "b t n v"]:
        """Return the factor on the output of the heads."""
        raise NotImplementedError

    def beta(self, x: Tokens) -> Float[Array, "b t n"]:
        """Return how much of the old value of a key is replaced, in at least float32."""
        return jax.nn.sigmoid(_at_least_float32(self.W_beta(x)))

    def attend(
        self,
        query: Tokens,
        *,
        mask: Mask | Array | None = None,
        lengths: ArrayLike | int | None = None,
        cache: DeltaCache | None = None,
        **options: Any,
    ) -> Outputs[DeltaCache]:
        """Return the output, with the new cache if there is a cache.

        Args:
            query: the input.
            mask: causal, segments (documents one after another) and lengths; with a cache it is
                that of the whole sequence, the same in every call.
            lengths: number of real tokens in each row, `(b,)`; the rest is padding. None is all.
            cache: state and last inputs, from `init_cache`.
            options: the other options of a block's attention, left unset: there are no weights, no
                bias, no positions and no dropout.
        """
        check_tokens("query", query, "d_in", self.d_in, self.context_length)
        check_recurrent_options(options)
        if cache is not None:
            check_type("cache", cache, DeltaCache, "what init_cache of this layer returns")
            b = len(query) if query.ndim == 3 else None
            wanted = DeltaCache.shapes(b, **self._cached)
            cache.check_shapes(wanted)
        # A sequence is computed as a batch of one. None, for no cache, is an empty tree.
        single = query.ndim == 2
        if single:
            query = query[None]
            cache = jax.tree.map(lambda x: x[None], cache)
        output, cache = self._attend(query, as_mask(mask), lengths, cache)
        if single:
            output = output[0]
            cache = jax.tree.map(lambda x: x[0], cache)
        return Outputs(output, cache=cache)

    def init_cache(self, b: int | None, capacity: int, dtype: Dtype | None = None) -> DeltaCache:
        """Return an empty cache for `b` sequences.

        With `b` None it holds one sequence, without a batch axis. Its size does not depend on
        `capacity`. `dtype` is that of the inputs of the convolutions; None is that of the key
        projection.
        """
        own = self.W_key.result_dtype
        return DeltaCache.zeros(b, **self._cached, dtype=own if dtype is None else dtype)

    @property
    def _cached(self) -> dict[str, int]:
        names = ("kernel_size", "num_heads", "head_dim", "value_dim", "num_key_heads")
        return {name: getattr(self, name) for name in names}

    def _attend(
        self, x: Array, mask: Mask, lengths: ArrayLike | int | None, cache: DeltaCache | None
    ) -> tuple[Array, DeltaCache | None]:
        b, t, _ = x.shape
        check_known_lengths(lengths, b, t)
        if cache is None:
            order = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
        else:
            order = cache.positions(t)
        # A state forgets at the start of a document: a mask that says more cannot be honoured.
        starts, lengths = documents_of(mask, order, lengths)
        after = 0
        if cache is not None:
            after, lengths = cache.count(t, lengths)
        if lengths is not None:
            # Padding must not reach the convolutions, which see tokens before their own.
            x = jnp.where(real_tokens(b, t, lengths)[..., None], x, 0)
            lengths = jnp.broadcast_to(jnp.asarray(lengths, jnp.int32), (b,))
        # Modules do not enter `shard_map`, which takes arrays alone.
        graph, convolutions = nnx.split((self.conv_query, self.conv_key, self.conv_value))
        arrays = {
            "inputs": (self.W_query(x), self.W_key(x), self.W_value(x)),
            "beta": self.beta(x),
            "decay": self.decay(x),
            "convolutions": convolutions,
            "cache": None if cache is None else tuple(cache.arrays.values()),
            "starts": starts,
            "lengths": lengths,
        }
        names: dict[str, Any] = {"cache": None if cache is None else _CACHED}
        for name, own in _AXES.items():
            # A decay of each head has no axis of features.
            names[name] = jax.tree.map(lambda x, own=own: own[: x.ndim], arrays[name])
        run = partial(_recur, graph, self.head_dim, self.value_dim, self.precision)
        heads = self.num_heads, self.num_key_heads
        outputs = _AXES["decay"], *_CACHED
        context, *last = by_rows_and_heads(run, arrays, names, outputs, b, heads)
        context = self._gated(context, x)
        if cache is not None:
            cache = DeltaCache(*last, length=after)
            # Numbers behind a cache that overflowed would be wrong, which is not to be missed.
            context = jnp.where(cache.invalid[:, None, None, None], jnp.nan, context)
        context = constrain(context, "batch", "tokens", "heads", None)
        joined = rearrange(context, "b t n v -> b t (n v)")
        return self.out_proj(joined), cache

    def work(self, t: int, s: int) -> Work:
        """Return the operations of a call of `t` queries, whatever `s`; projections included."""
        # A token reads the state for what it knows of its key, adds the rest, and reads it again.
        state = self.num_heads * self.head_dim * self.value_dim
        return products(self, t) + Work(attention=3 * 2 * t * state)

    def _gated(self, heads: Array, x: Array) -> Array:
        return self.norm(heads) * self.gate(x)


_AXES = {
    "inputs": ("batch", None, "heads"),
    "beta": ("batch", None, "heads"),
    "decay": ("batch", None, "heads", None),
    "convolutions": (None, "heads"),
    "starts": ("batch", None),
    "lengths": ("batch",),
}
# Last inputs, state.
_CACHED = (*(("batch", None, "heads"),) * 3, ("batch", "heads", None, None))


def _recur(
    graph: Any, head_dim: int, value_dim: int, precision: PrecisionLike, arrays: Any
) -> tuple[Array, ...]:
    """Return what the heads read, the last inputs of the three convolutions, and the state."""
    convolutions = nnx.merge(graph, arrays["convolutions"])
    options = {"starts": arrays["starts"], "lengths": arrays["lengths"]}
    *before, state = arrays["cache"] or (None, None, None, None)
    outputs = []
    last = []
    for convolution, x, inputs in zip(convolutions, arrays["inputs"], before, strict=True):
        found = convolution(x, inputs, **options)
        outputs.append(found.output)
        last.append(found.state)
    # By the width of a head: here a device has its own heads alone.
    query = rearrange(outputs[0], "b t (k h) -> b t k h", h=head_dim)
    key = rearrange(outputs[1], "b t (k h) -> b t k h", h=head_dim)
    value = rearrange(outputs[2], "b t (n v) -> b t n v", v=value_dim)
    tokens = _unit(query), _unit(key), value, arrays["decay"], arrays["beta"]
    output, state = gated_delta_rule(*tokens, state=state, precision=precision, **options)
    return output, *last, state


def _unit(x: Array) -> Array:
    """Return `x / sqrt(sum(x^2) + 1e-6)` over the last axis."""
    y = _at_least_float32(x)
    squares = jnp.square(y).sum(axis=-1, keepdims=True)
    return (y * jax.lax.rsqrt(squares + 1e-6)).astype(x.dtype)


def _at_least_float32(x: Array) -> Array:
    return x.astype(accumulation_dtype(x.dtype))
