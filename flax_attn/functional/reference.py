"""The formula itself, with all scores in memory: the reference for every backend.

    weights = dropout(softmax(mask(score(soft_cap(scale * query @ key^T + bias))), sinks))
    output  = weights @ value

References:
    Vaswani et al. 2017, "Attention Is All You Need" (arXiv:1706.03762);
    Ainslie et al. 2023, grouped queries (arXiv:2305.13245);
    Gemma Team 2024, soft-capped logits (arXiv:2408.00118);
    Xiao et al. 2023, attention sinks (arXiv:2309.17453).
"""

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from flax_attn.functional.dropout import KeyedDropout, drop, keep_grid
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.masks import Mask
from flax_attn.functional.nonfinite import finite_tokens, sees_nonfinite, zero_nonfinite
from flax_attn.functional.parameter_sums import widened
from flax_attn.functional.shapes import Bias, Key, Query, Value, Visible, Weights
from flax_attn.functional.traced_score import TracedScore


def reference_attention(
    query: Query,
    key: Key,
    value: Value,
    bias: Bias | None,
    mask: Mask,
    *,
    scale: float | Float[Array, ""],
    soft_cap: float | None,
    score: TracedScore | None = None,
    sinks: Float[Array, " n"] | None,
    dropout: KeyedDropout | None,
    precision: jax.lax.PrecisionLike,
) -> tuple[Float[Array, "b t n v"], Weights]:
    """Return the output and the weights that were applied to the values.

    All arithmetic is in the dtype of the inputs, but at least float32. A row that may see nothing
    gives zeros with zero gradient. A number in query, key or value that is not finite reaches the
    rows that may see it, as NaN, and only these.

    Shapes:
        query `(b, t, n, h)`, key `(b, s, k, h)`, value `(b, s, k, v)` with k dividing n.
        Returns `(b, t, n, v)` and `(b, n, t, s)`, in the dtype of the query.
    """
    low = query.dtype
    dtype = accumulation_dtype(low)
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    query_ok = finite_tokens(query)
    key_ok = finite_tokens(key) & finite_tokens(value)
    # 0 * NaN is NaN: no weight would keep out what is not finite.
    query, key, value = (zero_nonfinite(x.astype(dtype)) for x in (query, key, value))
    # Before it is broadcast, so that its gradient is summed in this dtype.
    bias = None if bias is None else widened(bias)
    visible, bias = hide(mask.materialise(*shape), bias)

    query = rearrange(query, "b t (k g) h -> b t k g h", k=key.shape[2])
    scores = jnp.einsum("b t k g h, b s k h -> b k g t s", query, key, precision=precision)
    scores = rearrange(scores, "b k g t s -> b (k g) t s") * scale
    scores = checkpoint_name(scores, "scores")
    scores = capped_scores(scores, bias, soft_cap)
    if score is not None:
        # Told of a score of 0 for what is hidden, which may have overflowed.
        scores = score.apply(jnp.where(visible, scores, 0))
    # Added to the scores, so that hidden keys keep a weight and a gradient of zero beside it.
    nan_rows = sees_nonfinite(visible, query_ok, key_ok)
    scores = scores + jnp.where(nan_rows, jnp.nan, 0).astype(dtype)
    weights = masked_softmax(scores, visible, sinks)
    if dropout is not None:
        keep = keep_grid(dropout, shape)
        dropped = drop(weights, keep, dropout.rate)
        # 0 * NaN is NaN: a row that is NaN stays so where all of its weights are dropped.
        weights = dropped + 0 * weights
    weights = checkpoint_name(weights, "weights")

    grouped = rearrange(weights, "b (k g) t s -> b k g t s", k=value.shape[2])
    output = jnp.einsum("b k g t s, b s k v -> b t k g v", grouped, value, precision=precision)
    output = rearrange(output, "b t k g v -> b t (k g) v")
    return output.astype(low), weights.astype(low)


def capped_scores(scores: Weights, bias: Bias | None, soft_cap: float | None) -> Weights:
    """Return `soft_cap * tanh((scores + bias) / soft_cap)`, each step where it is given.

    Example:
        >>> capped_scores(jnp.array([[[[50.0, -50.0]]]]), None, soft_cap=2.0)
        Array([[[[ 2., -2.]]]], dtype=float32)
    """
    if bias is not None:
        scores = scores + bias.astype(scores.dtype)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    return scores


def masked_softmax(
    scores: Weights, visible: Visible, sinks: Float[Array, " n"] | None = None
) -> Weights:
    """Return the softmax over what is visible; rows that see nothing are zeros.

        exp(x_j) / (exp(sink) + sum_j exp(x_j))    over the visible j
    Example:
        >>> visible = jnp.array([[[[True, True], [False, False]]]])
        >>> masked_softmax(jnp.zeros((1, 1, 2, 2)), visible)[0, 0]
        Array([[0.5, 0.5],
               [0. , 0. ]], dtype=float32)
    """
    masked = jnp.where(visible, scores, -jnp.inf)
    masked = checkpoint_name(masked, "masked")
    # Read back, so that a value substituted for "masked" decides what is hidden.
    visible = masked != -jnp.inf
    top = masked.max(axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(scores.dtype)[None, :, None, None]
        top = jnp.maximum(top, sinks)
    # The largest of a row that sees nothing is -inf, and -inf - -inf is NaN.
    top = jnp.where(jnp.isfinite(top), top, 0)
    # It cancels out, and so does its gradient.
    top = jax.lax.stop_gradient(top)
    exps = jnp.exp(masked - top)
    total = exps.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    # The sum of a row that sees nothing.
    total = jnp.where(total == 0, 1, total)
    # Zero where hidden and not by underflow alone: the gradient there may be infinite, and 0 * inf
    # is NaN.
    return jnp.where(visible, exps / total, 0)


def hide(visible: Visible, bias: Bias | None) -> tuple[Visible, Array | None]:
    """Return what is visible beside a bias of -inf, and the bias without it.

    It hides like a mask: kept in the sum it would turn gradients, and empty rows, into NaN.
    """
    if bias is None:
        return visible, None
    # Beside NaN it is visible: NaN reaches the rows that see it.
    visible = visible & (bias != -jnp.inf)
    return visible, jnp.where(visible, bias, 0)
