"""One attention call under one contract: checked once, then computed by a backend."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypedDict, Unpack

import jax
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from attn_spec.other_libraries import ASKS_NOTHING, OF_FUNCTIONS, names_remedies
from flax_attn.backends import derivatives, reference
from flax_attn.backends.call import Call, prepare
from flax_attn.backends.choose import choose
from flax_attn.backends.interception import current_interceptor
from flax_attn.functional.cache_base import Cache
from flax_attn.functional.dropout import KeyedDropout
from flax_attn.functional.masks import Mask, as_mask
from flax_attn.functional.outputs import Outputs
from flax_attn.functional.score_function import ScoreFunction
from flax_attn.functional.shapes import Key, Query, Value
from flax_attn.sharding import attention as sharded
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


@names_remedies(OF_FUNCTIONS, ASKS_NOTHING)
def dot_product_attention(
    query: Query,
    key: Key,
    value: Value,
    bias: Array | None = None,
    mask: Mask | Array | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    score: Callable | ScoreFunction | None = None,
    sinks: Float[Array, " n"] | None = None,
    dropout: KeyedDropout | None = None,
    precision: jax.lax.PrecisionLike = None,
    backend: str = "auto",
) -> Array:
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
        mask: a `Mask`, or a boolean array that broadcasts to `(b, n, t, s)`, True = attend. One of
            known 0 and 1 is taken, too.
        is_causal: whether the mask is also causal, as by `mask & Mask.causal()`.
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

    Returns:
        `(b, t, n, v)`, without `b` for unbatched inputs; `attend` also returns the weights. A row
        that may see nothing gives zeros with zero gradient. A number in query, key or value that is
        not finite only makes the rows NaN that may see it.

    Raises:
        ValueError: if an argument is no array or number, if shapes, dtypes, mask or bias do not fit
            one another, if a causal mask has no offset although t != s, or if the backend is
            unknown.
        TypeError: for an argument that it does not have; those of other libraries are named with
            what to pass instead.
        Unsupported: a `ValueError`, if a backend that is named does not support the call.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.ones((2, 5, 4, 8))
        >>> dot_product_attention(x, x, x, mask=Mask.causal()).shape
        (2, 5, 4, 8)

    References:
        Vaswani et al. 2017 (arXiv:1706.03762); Ainslie et al. 2023 (arXiv:2305.13245).
    """
    options: AttentionOptions = {
        "scale": scale,
        "soft_cap": soft_cap,
        "score": score,
        "sinks": sinks,
        "dropout": dropout,
        "precision": precision,
        "backend": backend,
    }
    return attend(query, key, value, bias, mask, is_causal=is_causal, **options).output


@names_remedies(OF_FUNCTIONS, ASKS_NOTHING)
def attend(
    query: Query,
    key: Key,
    value: Value,
    bias: Array | None = None,
    mask: Mask | Array | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    score: Callable | ScoreFunction | None = None,
    sinks: Float[Array, " n"] | None = None,
    dropout: KeyedDropout | None = None,
    precision: jax.lax.PrecisionLike = None,
    backend: str = "auto",
    return_weights: bool = False,
) -> Outputs[Cache]:
    """Attention as `dot_product_attention`, with its weights if `return_weights`.

    The other arguments and errors are those of `dot_product_attention`. The weights `(b, n, t, s)`
    are those that were applied to the values, after dropout. The output is the same with and
    without them, bit for bit.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.ones((2, 5, 4, 8))
        >>> attended = attend(x, x, x, mask=Mask.causal(), return_weights=True)
        >>> attended.output.shape, attended.weights.shape
        ((2, 5, 4, 8), (2, 4, 5, 5))
    """
    numerics = {"scale": scale, "soft_cap": soft_cap, "dropout": dropout, "precision": precision}
    what = {"is_causal": is_causal, "score": score, "sinks": sinks}
    call = prepare(query, key, value, bias, mask, **what, **numerics)
    # Read after the checks: before them it may be no array.
    unbatched = query.ndim == 3
    inputs = "query", "key", "value"
    named = {name: checkpoint_name(getattr(call, name), name) for name in inputs}
    output, weights = _attend(replace(call, **named), backend, return_weights)
    output = checkpoint_name(output, "context")
    # One sequence was a batch of one.
    if unbatched:
        output, weights = output[0], None if weights is None else weights[0]
    return Outputs(output, weights)


def _attend(call: Call, backend: str, return_weights: bool) -> tuple[Array, Array | None]:
    division = divide(call, backend)
    interceptor = current_interceptor()
    if interceptor is not None:
        output = interceptor(call, backend)
    elif division is not None:
        output = sharded.attend(division, call, Kernel(backend))
    else:
        chosen = choose(call, backend)
        if return_weights and chosen.name == "reference":
            return reference.with_weights(call)
        output = derivatives.attend(chosen, call)
    if not return_weights:
        return output, None
    _, weights = reference.with_weights(call)
    return output, weights


def single_head_attention(
    query: Float[Array, "*b t h"],
    key: Float[Array, "*b s h"],
    value: Float[Array, "*b s v"],
    *,
    mask: Mask | Array | None = None,
    **options: Unpack[AttentionOptions],
) -> Array:
    """`dot_product_attention` of one head, without a head axis.

    Shapes:
        query `(b, t, h)`, key `(b, s, h)`, value `(b, s, v)`, or all without b; mask `(b, t, s)` or
        broadcasting to it.
        Returns `(b, t, v)`.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.eye(2)
        >>> print((100 * single_head_attention(x, x, x, scale=1.0)).astype(int))
        [[73 26]
         [26 73]]
    """
    return attend_one_head(query, key, value, mask=mask, **options).output


def attend_one_head(
    query: Float[Array, "*b t h"],
    key: Float[Array, "*b s h"],
    value: Float[Array, "*b s v"],
    *,
    mask: Mask | Array | None = None,
    return_weights: bool = False,
    **options: Unpack[AttentionOptions],
) -> Outputs[Cache]:
    """`attend` of one head, without a head axis; the weights are `(b, t, s)`.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.ones((2, 5, 8))
        >>> attend_one_head(x, x, x, return_weights=True).weights.shape
        (2, 5, 5)
    """
    query, key, value = (rearrange(x, "... t h -> ... t 1 h") for x in (query, key, value))
    mask = as_mask(mask, heads=False)
    found = attend(query, key, value, mask=mask, return_weights=return_weights, **options)
    output, weights = rearrange(found.output, "... t 1 v -> ... t v"), found.weights
    if weights is not None:
        weights = rearrange(weights, "... 1 t s -> ... t s")
    return Outputs(output, weights)
