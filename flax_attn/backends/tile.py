"""What attention computes in one tile, some queries against some keys: pure functions of arrays.

`blocked` and `fused` are loops over these. Where a tile lies, and how it is read, is theirs.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from flax_attn.backends.softmax import Sums
from flax_attn.functional.dropout import threefry_2x32, threshold

Scores = Float[Array, "*b t s"]
Dot = Callable[[Array, Array], Array]
Pull = Callable[[Array, Array], tuple[Array, tuple[Array, ...]]]


class TileScores(NamedTuple):
    """The scores of a tile.

    Args:
        masked: scores as the softmax takes them, -inf where hidden.
        capped: scores after the soft cap, before a function of scores changed them.
    """

    masked: Scores
    capped: Scores


class TileGradients(NamedTuple):
    """The gradients that come out of the scores of a tile.

    Args:
        scores: gradient of the scaled products, which is also that of the bias.
        captured: gradients of the arrays that a function of scores captures.
    """

    scores: Scores
    captured: tuple[Array, ...] = ()


def scores(
    products: Scores,
    bias: Float[Array, "*#b #t #s"] | None,
    visible: Bool[Array, "*#b #t #s"] | None,
    soft_cap: float | None = None,
    function: Callable[[Scores], Scores] | None = None,
    more: Float[Array, "*#b #t #s"] | None = None,
) -> TileScores:
    """Return the scores of a tile.

    Args:
        products: scaled products of queries and keys.
        bias: numbers added to them, or None; -inf hides.
        visible: what the mask shows; None hides nothing.
        soft_cap: bound of the scores, or None.
        function: function that changes the scores, or None.
        more: numbers added to what is visible at last, NaN for tokens that are not finite; or None.

    Example:
        >>> found = scores(jnp.array([[1.0, 2.0]]), None, jnp.array([[True, False]]))
        >>> found.masked.tolist()
        [[1.0, -inf]]
    """
    x = products
    changed = not (soft_cap is None and function is None and more is None)
    if bias is not None and changed:
        # A cap, a function and NaN would turn the -inf that hides into a number.
        hides = bias == -jnp.inf
        visible = ~hides if visible is None else ~hides & visible
        bias = jnp.where(hides, 0, bias)
    if bias is not None:
        x = x + bias
    if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
    final = x if function is None else function(x)
    final = final if more is None else final + more
    return TileScores(final if visible is None else jnp.where(visible, final, -jnp.inf), x)


def over_nothing(rows: int, width: int, dtype: jnp.dtype) -> Sums:
    """Return the sums over no keys, with values of a width."""
    # The number below all scores: unlike -inf it can be subtracted from itself.
    top = jnp.full((rows, 1), float(jnp.finfo(dtype).min), dtype)
    return Sums(jnp.zeros((rows, width), dtype), top, jnp.zeros((rows, 1), dtype))


def softmax_step(
    done: Sums,
    masked: Scores,
    value: Float[Array, "s v"],
    dot: Dot,
    factors: Scores | None = None,
    exp: Callable[[Array], Array] = jnp.exp,
) -> Sums:
    """Return the sums over the keys of `done` and those of a tile.

        top' = max(top, max masked);  e = exp(masked - top')
        total' = total exp(top - top') + sum e
        output' = output exp(top - top') + (e factors) value

    A row of which the tile is hidden keeps its bits. `factors` are those of dropout, or None.
    `exp` is the function that takes e to a power.
    """
    highest = masked.max(axis=-1, keepdims=True)
    top = jnp.maximum(done.top, highest)
    exps = exp(masked - top)
    shrink = exp(done.top - top)
    return Sums(
        output=done.output * shrink + dot(times(exps, factors), value),
        top=top,
        total=done.total * shrink + exps.sum(axis=-1, keepdims=True),
    )


def times(x: Array, factors: Array | None) -> Array:
    """Return weights or gradients times the factors of dropout, if there are any."""
    return x if factors is None else x.astype(factors.dtype) * factors


def dropout_factors(
    head_key: tuple[Array, Array], rows: Array, cols: Array, rate: float, dtype: jnp.dtype
) -> Scores:
    """Return the factors of dropout of a tile: 0 or `1 / (1 - rate)`.

    Args:
        head_key: the two words of the key of a row of the batch and a head.
        rows: indices of the queries in the whole call, `(t, 1)`, uint32.
        cols: indices of the keys in the whole call, `(1, s)`, uint32.
        rate: probability that a weight is dropped.
        dtype: dtype of the factors.
    """
    bits, _ = threefry_2x32(head_key, (rows, cols))
    return jnp.where(bits >= jnp.uint32(threshold(rate)), 1 / (1 - rate), 0).astype(dtype)


def score_gradients(
    weights: Scores,
    d_weights: Scores,
    delta: Float[Array, "*#b #t #s"],
    capped: Scores,
    soft_cap: float | None = None,
    pull: Pull | None = None,
) -> TileGradients:
    """Return the gradients of the scores of a tile.

        d = weights (d_weights - delta)

    and from there back through the function of scores and the soft cap.

    Args:
        weights: weights of the softmax before dropout, 0 where hidden. Where they are not divided
            by the sum of their row, the next two are.
        d_weights: gradient of the weights.
        delta: sum of `weights * d_weights` over all keys of a row, as a column, or as a row where
            each column is a query.
        capped: scores after the soft cap.
        soft_cap: bound of the scores, or None.
        pull: function from the scores after the cap, and the gradient of what the function of
            scores made of them, to the gradients of both; or None.
    """
    d_scores = weights * (d_weights - delta)
    seen = weights != 0
    captured = ()
    if pull is not None:
        # Zeros where nothing is seen, for what overflowed: captured arrays sum over all pairs.
        d_scores, captured = pull(jnp.where(seen, capped, 0), jnp.where(seen, d_scores, 0))
    if soft_cap is not None:
        d_scores = d_scores * (1 - (capped / soft_cap) ** 2)
    return TileGradients(jnp.where(seen, d_scores, 0), captured)
