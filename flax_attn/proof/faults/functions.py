"""Faults of functions as masks and scores: the arguments they get, and where they are applied."""

from collections.abc import Callable
from dataclasses import replace

import torch

from flax_attn.proof.faults.fault import Patch, Wrap, fault
from torch_ref import ScoreFunction
from torch_ref.functional.mask_function import Where

MASK = "multi_head_function_mask"
# 4 heads that share 2 key/value heads.
SCORE = "multi_head_function_score"
RING = "multi_head_function_window"
# Of the row of scores.
SOFT_CAP = 1.5
CACHE = "cache = full"


def score_indices_patch(change: Callable) -> Patch:
    """Return the patch that changes the indices that a function of scores is told of."""

    def apply(apply, score, scores):
        def function(x, *indices):
            return score.function(x, *change(*indices))

        return apply(replace(score, function=function), scores)

    return Wrap(ScoreFunction, "apply", apply)


def mask_indices_patch(change: Callable) -> Patch:
    """Return the patch that changes the indices that a mask asks its function about."""

    def allow(allow, part, rows, cols):
        def function(*indices):
            return part.function(*change(*indices))

        return allow(replace(part, function=function), rows, cols)

    return Wrap(Where, "allow", allow)


def before_the_cap(apply, score, scores):
    """The function on scores that have no soft cap yet."""
    return SOFT_CAP * torch.tanh(apply(score, SOFT_CAP * torch.atanh(scores / SOFT_CAP)) / SOFT_CAP)


def token_order_patch(**positions):
    """Return the patch by which queries or keys stand where they are in the call."""
    return Wrap(
        ScoreFunction,
        "apply",
        lambda apply, score, scores: apply(replace(score, **positions), scores),
    )


FAULTS = (
    fault("function_told_of_the_first_row",
          "A function of scores is told of the first row of the batch alone.", SCORE,
          score_indices_patch(lambda b, n, i, j: (0 * b, n, i, j))),
    fault("function_told_of_the_shared_head",
          "A function of scores is told of the key/value head.", SCORE,
          score_indices_patch(lambda b, n, i, j: (b, n // 2, i, j))),
    fault("function_told_key_first",
          "A function of scores is told of the key before the query.", SCORE,
          score_indices_patch(lambda b, n, i, j: (b, n, j, i))),
    fault("function_before_the_soft_cap", "A function of scores comes before the soft cap.", SCORE,
          Wrap(ScoreFunction, "apply", before_the_cap)),
    fault("no_function_of_scores", "A function of scores is not applied.", SCORE,
          Wrap(ScoreFunction, "apply", lambda apply, score, scores: scores)),
    fault("function_twice", "A function of scores is applied twice.", SCORE,
          Wrap(ScoreFunction, "apply",
               lambda apply, score, scores: apply(score, apply(score, scores)))),
    fault("gradient_stops_at_the_function",
          "The gradient does not go through a function of scores.", SCORE,
          Wrap(ScoreFunction, "apply",
               lambda apply, score, scores: (
                   scores + (apply(score, scores) - scores).detach())),
          check="gradients"),
    fault("function_restarts",
          "With a cache, a function of scores counts queries from 0 in every step.", SCORE,
          token_order_patch(query_positions=None), check=CACHE),
    fault("function_told_of_slots",
          "A function of scores is told of slots in a ring buffer, not of positions.", RING,
          token_order_patch(key_positions=None), check=CACHE),
    fault("function_hides", "True from the function of a mask hides.", MASK,
          Wrap(Where, "allow", lambda allow, *arguments: ~allow(*arguments))),
    fault("function_asked_for_one_head",
          "The function of a mask is asked about the first head for all.", MASK,
          mask_indices_patch(lambda b, n, i, j: (b, 0 * n, i, j))),
    fault("function_asked_for_one_row",
          "The function of a mask is asked about the first row of the batch for all.", MASK,
          mask_indices_patch(lambda b, n, i, j: (0 * b, n, i, j))),
    fault("function_asked_key_first",
          "The function of a mask is asked about the key before the query.", MASK,
          mask_indices_patch(lambda b, n, i, j: (b, n, j, i))),
    fault("function_of_a_mask_restarts",
          "With a cache, the function of a mask counts queries from 0 in every step.", MASK,
          Wrap(Where, "allow",
               lambda allow, part, rows, cols: allow(part, rows - rows.min(), cols)), check=CACHE),
)  # fmt: skip
