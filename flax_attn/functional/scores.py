"""How an attention module computes its scores, between the product and the softmax."""

from collections.abc import Callable
from dataclasses import dataclass

from attn_spec.attention_checks import check_scale, check_soft_cap
from attn_spec.function_checks import SCORES, check_function
from flax_attn.functional.score_function import ScoreFunction
from flax_attn.functional.shapes import ArrayLike


@dataclass(frozen=True)
class Scores:
    """How an attention module computes its scores; whatever is not given is left out.

        softmax([sink, function(soft_cap * tanh((scale * q k^T + bias) / soft_cap))])

    where the sink's own weight is dropped.

    Args:
        scale: factor on the scores; None is `1 / sqrt(h)`, T5 takes 1.0.
        soft_cap: bound of the scores to `(-soft_cap, soft_cap)`, as in Gemma 2; None is no bound.
        sinks: whether each head learns a logit that takes part in the softmax and attends to
            nothing, as in gpt-oss. The parameter `sinks` of shape `(n,)` starts at 0, where the
            softmax divides by `1 + sum_j exp(x_j)`.
        function: function that changes each score, `function(score, b, n, i, j)`, given the row of
            the batch, the query head and the positions of query and key, those in the whole
            sequence beside a cache; see `ScoreFunction`.

    Raises:
        ValueError: if `scale` or `soft_cap` is no finite number, or the function takes other
            arguments.

    Example:
        >>> Scores(soft_cap=50.0)
        Scores(scale=None, soft_cap=50.0, sinks=False, function=None)

    References:
        Gemma Team 2024, soft-capped scores (arXiv:2408.00118);
        Xiao et al. 2023, attention sinks (arXiv:2309.17453);
        Dong et al. 2024, functions of scores (arXiv:2412.05496).
    """

    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    function: Callable | None = None

    def __post_init__(self):
        if self.scale is not None:
            check_scale(self.scale, None, "")
        check_soft_cap(self.soft_cap)
        if self.function is not None:
            check_function("score", self.function, SCORES)

    def placed(self, query_positions: ArrayLike, key_positions: ArrayLike) -> ScoreFunction | None:
        """Return the function for queries and keys at these positions, or None if there is none."""
        if self.function is None:
            return None
        return ScoreFunction(self.function, query_positions, key_positions)
