"""A function that changes the scores of attention, given the indices of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.typing import Dtype
from jaxtyping import Array

from attn_spec.function_checks import SCORES, check_scored, check_token_positions
from attn_spec.scores import Scores
from flax_attn.functional.dtypes import dtype_name, is_integer
from flax_attn.functional.shapes import ArrayLike
from flax_attn.functional.traced import trace
from flax_attn.functional.traced_score import TracedScore


@dataclass(frozen=True)
class ScoreFunction:
    """A function of scores, and the positions of queries and keys that it gets.

        score = function(score, b, n, i, j)

    Written for scalars: `score` is the scaled product with bias and soft cap, `b` the row of the
    batch, `n` the query head, `i` the position of the query and `j` that of the key. What it
    returns goes into the softmax; `-inf` hides, though only a mask keeps out numbers that are not
    finite. It is computed for hidden pairs too, of a score of 0, and its derivatives there have to
    be finite. Arrays that it captures have gradients.

    Args:
        function: function as above, in the dtype of the score, which is float32 for lower dtypes.
        query_positions: integers `(t,)` or `(b, t)`; None is the order of the queries.
        key_positions: integers `(s,)` or `(b, s)`; None is the order of the keys.

    Raises:
        ValueError: in a call, if the function takes other arguments or returns something else, or
            if there is not one position for each token, or an array is read at an index that goes
            beyond its end.

    Example:
        >>> from flax_attn import attend
        >>> x = jnp.ones((1, 2, 1, 4))
        >>> near = ScoreFunction(lambda score, b, n, i, j: jnp.where(i == j, score, score - 0.5))
        >>> weights = attend(x, x, x, score=near, return_weights=True).weights
        >>> print((100 * weights).astype(int)[0, 0])
        [[62 37]
         [37 62]]

    References:
        Dong et al. 2024, FlexAttention (arXiv:2412.05496).
    """

    function: Callable
    query_positions: Any = None
    key_positions: Any = None

    def trace(self, shape: tuple[int, int, int, int], dtype: Dtype) -> TracedScore:
        """Return the function as data, for scores of a shape and dtype."""
        b, n, t, s = shape
        score = jax.ShapeDtypeStruct((), dtype)
        traced, result = trace("score", self.function, SCORES, (score,))
        check_scored(dtype_name(result.dtype), result.shape, dtype_name(dtype), ())
        counts = {"b": b, "n": n}
        # Positions that are given are not read, so that no call waits for the device.
        if self.query_positions is None:
            counts["i"] = t
        if self.key_positions is None:
            counts["j"] = s
        traced.check_tables("score", SCORES, counts)
        return TracedScore(
            function=traced,
            b=jnp.arange(b, dtype=jnp.int32),
            n=jnp.arange(n, dtype=jnp.int32),
            rows=_as_rows("query", self.query_positions, b, t),
            cols=_as_rows("key", self.key_positions, b, s),
        )


def _as_rows(name: str, positions: Any, b: int, tokens: int) -> Array:
    """Return positions as `(#b, tokens)`; None is the order of the tokens."""
    if positions is None:
        return jnp.arange(tokens, dtype=jnp.int32)[None]
    positions = jnp.asarray(positions)
    check_token_positions(name, positions.shape, is_integer(positions.dtype), b, tokens)
    positions = jnp.atleast_2d(positions).astype(jnp.int32)
    # A slot without a key is at -1.
    return jnp.maximum(positions, 0)


def placed_score(
    scores: Scores, query_positions: ArrayLike, key_positions: ArrayLike
) -> ScoreFunction | None:
    """Return the function of a module's scores for these positions, or None if it has none."""
    if scores.function is None:
        return None
    return ScoreFunction(scores.function, query_positions, key_positions)
