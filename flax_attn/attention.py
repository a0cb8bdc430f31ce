"""One attention call under one contract: checked once, then computed by a backend."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypedDict, Unpack, overload

import jax
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from flax_attn.backends import reference
from flax_attn.backends.call import Call, prepare
from flax_attn.backends.choose import choose
from flax_attn.functional.dropout import KeyedDropout
from flax_attn.functional.masks import Mask, as_mask
from flax_attn.functional.score_function import ScoreFunction
from flax_attn.functional.shapes import Key, Query, Value
from flax_attn.sharding.attention import attend
from flax_attn.sharding.partition import divide
from flax_attn.sharding.strategies import Kernel


class AttentionOptions(TypedDict, total=False):
    """The options of `dot_product_attention`, as keyword arguments of what passes them on."""

    scale: float | None
    soft_cap: float | None
    score: Callable | ScoreFunction | None
    sinks: Float[Array, " n"] | None
    dropout: KeyedDropout | None
    precision: jax.lax.PrecisionLike
    backend: str


@overload
def dot_product_attention(
    query: Query,
    key: Key,
    value: Value,
    bias: Array | None = None,
    mask: Mask | Array | None = None,
    *,
    return_weights: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Array: ...


@overload
def dot_product_attention(
    query: Query,
    key: Key,
    value: Value,
    bias: Array | None = None,
    mask: Mask | Array | None = None,
    *,
    return_weights: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Array, Array]: ...


@overload
def dot_product_attention(
    query: Query,
    key: Key,
    value: Value,
    bias: Array | None = None,
    mask: Mask | Array | None = None,
    *,
    return_weights: bool,
    **options: Unpack[AttentionOptions],
) -> Array | tuple[Array, Array]: ...


def dot_product_attention(
    query: Query,
    key: Key,
    value: Value,
    bias: Array | None = None,
    mask: Mask | Array | None = None,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    score: Callable | ScoreFunction | None = None,
    sinks: Float[Array, " n"] | None = None,
    dropout: KeyedDropout | None = None,
    precision: jax.lax.PrecisionLike = None,
    backend: str = "auto",
    return_weights: bool = False,
) -> Array | tuple[Array, Array]:
    """Scaled dot-product attention.

        weights = dropout(softmax(mask(score(soft_cap(scale * query @ key^T + bias))), sinks))
        output  = weights @ value

    Query head `i` reads key/value head `i // (n / k)`: multi-head for k = n, grouped-query for k <
    n, multi-query for k = 1. The softmax and all sums are in float32 for lower dtypes, and in the
    dtype of the inputs otherwise.

    All backends compute the same function and differ in speed and memory: `explain` says which one
    runs a call, and why. The intermediates are named for `jax.checkpoint_policies`: query, key,
    value, context, and in the reference also scores, masked and weights.

    Args:
        query: `(b, t, n, h)` or `(t, n, h)`.
        key: `(b, s, k, h)` or `(s, k, h)`, k dividing n.
        value: `(b, s, k, v)` or `(s, k, v)`.
        bias: numbers added to the scaled scores; broadcasts to `(b, n, t, s)`. `-inf` hides.
        mask: a `Mask`, or a boolean array that broadcasts to `(b, n, t, s)`, True = attend.
        scale: factor on the scores, a finite number or an array of shape `()`; None is `1 /
            sqrt(h)`.
        soft_cap: bound of the scores, `soft_cap * tanh(scores / soft_cap)`; a number known before
            tracing.
        score: function that changes the scores, `score(score, b, n, i, j)`, written for scalars, or
            a `ScoreFunction`.
        sinks: `(n,)`, a logit per head that takes part in the softmax and attends to nothing.
        dropout: dropout of the weights; the same key drops the same weights in every backend and in
            `torch_ref`.
        precision: precision of the matrix products, as in `jax.lax.dot_general`.
        backend: name of a backend (`flax_attn.backends.registry.BACKENDS`), or `"auto"`, which
            chooses one.
        return_weights: whether to return `(output, weights)`; the output stays the same, bit for
            bit.

    Returns:
        `(b, t, n, v)`, and with `return_weights` also the weights `(b, n, t, s)` that were applied
        to the values, after dropout; both without `b` for unbatched inputs. A row that may see
        nothing gives zeros with zero gradient. A number in query, key or value that is not finite
        reaches the rows that may see it, as NaN, and no others.

    Raises:
        ValueError: if an argument is no array or number, if shapes, dtypes, mask or bias do not fit
            one another, if a causal mask has no offset although t != s, or if the backend is
            unknown.
        Unsupported: a `ValueError`, if a backend that is asked for by name cannot honour the call.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.ones((2, 5, 4, 8))
        >>> dot_product_attention(x, x, x, mask=Mask.causal()).shape
        (2, 5, 4, 8)

    References:
        Vaswani et al. 2017 (arXiv:1706.03762); Ainslie et al. 2023 (arXiv:2305.13245).
    """
    numerics = {"scale": scale, "soft_cap": soft_cap, "dropout": dropout, "precision": precision}
    call = prepare(query, key, value, bias, mask, score=score, sinks=sinks, **numerics)
    call = replace(
        call,
        **{name: checkpoint_name(getattr(call, name), name) for name in ("query", "key", "value")},
    )
    output, weights = _attend(call, backend, return_weights)
    output = checkpoint_name(output, "context")
    if query.ndim == 3:
        output, weights = output[0], None if weights is None else weights[0]
    return output if weights is None else (output, weights)


def _attend(call: Call, backend: str, return_weights: bool) -> tuple[Array, Array | None]:
    division = divide(call, backend)
    if division is None and return_weights and choose(call, backend).name == "reference":
        return reference.with_weights(call)
    output = (
        choose(call, backend).attend(call)
        if division is None
        else attend(division, call, Kernel(backend))
    )
    return output, reference.with_weights(call)[1] if return_weights else None


@overload
def single_head_attention(
    query: Float[Array, "*b t h"],
    key: Float[Array, "*b s h"],
    value: Float[Array, "*b s v"],
    *,
    mask: Mask | Array | None = None,
    return_weights: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Array: ...


@overload
def single_head_attention(
    query: Float[Array, "*b t h"],
    key: Float[Array, "*b s h"],
    value: Float[Array, "*b s v"],
    *,
    mask: Mask | Array | None = None,
    return_weights: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Array, Array]: ...


@overload
def single_head_attention(
    query: Float[Array, "*b t h"],
    key: Float[Array, "*b s h"],
    value: Float[Array, "*b s v"],
    *,
    mask: Mask | Array | None = None,
    return_weights: bool,
    **options: Unpack[AttentionOptions],
) -> Array | tuple[Array, Array]: ...


def single_head_attention(
    query: Float[Array, "*b t h"],
    key: Float[Array, "*b s h"],
    value: Float[Array, "*b s v"],
    *,
    mask: Mask | Array | None = None,
    return_weights: bool = False,
    **options: Unpack[AttentionOptions],
) -> Array | tuple[Array, Array]:
    """`dot_product_attention` of one head, without a head axis.

    Shapes:
        query `(b, t, h)`, key `(b, s, h)`, value `(b, s, v)`, or all without b; mask `(b, t, s)` or
        broadcasting to it.
        Returns `(b, t, v)`, and with `return_weights` also the weights `(b, t, s)`.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.eye(2)
        >>> print((100 * single_head_attention(x, x, x, scale=1.0)).astype(int))
        [[73 26]
         [26 73]]
    """
    query, key, value = (rearrange(x, "... t h -> ... t 1 h") for x in (query, key, value))
    mask = as_mask(mask, heads=False)
    if not return_weights:
        output = dot_product_attention(query, key, value, mask=mask, **options)
        return rearrange(output, "... t 1 v -> ... t v")
    output, weights = dot_product_attention(
        query, key, value, mask=mask, return_weights=True, **options
    )
    return rearrange(output, "... t 1 v -> ... t v"), rearrange(weights, "... 1 t s -> ... t s")
