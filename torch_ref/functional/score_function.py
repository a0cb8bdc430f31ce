"""A function that changes the scores of attention, given the indices of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_spec.function_checks import (
    SCORES,
    check_function,
    check_scored,
    check_token_positions,
)
from attn_spec.scores import Scores
from torch_ref.functional.called import called
from torch_ref.functional.dtypes import dtype_name, is_integer
from torch_ref.functional.shapes import ArrayLike, Weights


@dataclass(frozen=True)
class ScoreFunction:
    """A function of scores, and the positions of queries and keys that it gets.

        score = function(score, b, n, i, j)

    Written for scalars: `score` is the scaled product with bias and soft cap, `b` the row of the
    batch, `n` the query head, `i` the position of the query and `j` that of the key. What it
    returns goes into the softmax; `-inf` hides, though only a mask keeps out numbers that are not
    finite. It is computed for hidden pairs too, of a score of 0, and its derivatives there have to
    be finite. Tensors that it captures have gradients.

    Example:
        >>> from torch_ref import attend
        >>> x = torch.ones((1, 2, 1, 4))
        >>> near = ScoreFunction(lambda score, b, n, i, j: torch.where(i == j, score, score - 0.5))
        >>> weights = attend(x, x, x, score=near, return_weights=True).weights
        >>> print((100 * weights).int()[0, 0])
        tensor([[62, 37],
                [37, 62]], dtype=torch.int32)
    """

    function: Callable
    query_positions: Any = None
    key_positions: Any = None

    def apply(self, scores: Weights) -> Weights:
        """Return the new scores."""
        b, n, t, s = scores.shape
        # Before it is called, so that an error names the arguments it must take.
        check_function("score", self.function, SCORES)
        rows = _as_rows("query", self.query_positions, b, t)
        cols = _as_rows("key", self.key_positions, b, s)
        indices = (
            torch.arange(b)[:, None, None, None],
            torch.arange(n)[None, :, None, None],
            rows[:, None, :, None],
            cols[:, None, None, :],
        )
        # Positions may come from the host, as lengths do.
        indices = [x.to(scores.device) for x in indices]
        result = called("score", self.function, scores, *indices)
        shape = tuple(result.shape)
        check_scored(dtype_name(result.dtype), shape, dtype_name(scores.dtype), (b, n, t, s))
        return result.expand(b, n, t, s)


def _as_rows(name: str, positions: Any, b: int, tokens: int) -> Tensor:
    """Return positions as `(#b, tokens)`; None is the order of the tokens."""
    if positions is None:
        return torch.arange(tokens)[None]
    positions = torch.as_tensor(positions)
    check_token_positions(name, tuple(positions.shape), is_integer(positions.dtype), b, tokens)
    # A slot without a key is at -1.
    return torch.atleast_2d(positions).clamp(min=0)


def placed_score(
    scores: Scores, query_positions: ArrayLike, key_positions: ArrayLike
) -> ScoreFunction | None:
    """Return the function of a module's scores for these positions, or None if it has none."""
    if scores.function is None:
        return None
    return ScoreFunction(scores.function, query_positions, key_positions)
