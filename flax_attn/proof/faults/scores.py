"""Faults of the scores and of the softmax."""

from __future__ import annotations

from typing import Any

import torch

import torch_ref
from flax_attn.proof.faults.fault import Plant, fault
from flax_attn.proof.faults.formulas import SINKS, SOFT_CAP
from torch_ref.functional import reference

ATTENTION = "multi_head_causal"


@fault(ATTENTION)
def scale_of_the_whole_width(plant: Plant) -> None:
    """Scores are scaled by the model's width, not a head's."""
    plant.module.scale = plant.module.d_out**-0.5


@fault(ATTENTION)
def no_scale(plant: Plant) -> None:
    """Scores are not scaled."""
    plant.module.scale = 1.0


@fault(ATTENTION)
def scaled_twice(plant: Plant) -> None:
    """Scores are scaled twice."""
    plant.module.scale = 1 / plant.module.head_dim


@fault(ATTENTION)
def softmax_in_float32(plant: Plant) -> None:
    """The softmax is always in float32."""
    _torch_softmax(plant, dtype=torch.float32)


@fault(ATTENTION)
def softmax_in_bfloat16(plant: Plant) -> None:
    """The softmax is in bfloat16."""
    _torch_softmax(plant, dtype=torch.bfloat16)


@fault(ATTENTION)
def softmax_over_the_queries(plant: Plant) -> None:
    """The softmax runs over the queries, not the keys."""
    _torch_softmax(plant, axis=-2)


@fault(ATTENTION)
def hidden_scores_of_minus_10(plant: Plant) -> None:
    """Hidden scores are -10, not -inf."""
    _torch_softmax(plant, hidden=-10.0)


@fault(ATTENTION, check="huge logits")
def hidden_scores_of_minus_10_000(plant: Plant) -> None:
    """Hidden scores are -1e4, not -inf."""
    _torch_softmax(plant, hidden=-1e4)


@fault(ATTENTION, check="padded rows")
def mean_of_the_values_for_an_empty_row(plant: Plant) -> None:
    """A row that may see nothing gives the mean of the values."""
    _torch_softmax(plant, hidden=torch.finfo(torch.float32).min)


@fault(ATTENTION, check="huge logits")
def largest_score_not_subtracted(plant: Plant) -> None:
    """The softmax does not subtract the largest score."""

    def softmax(scores, visible, sinks=None):
        exps = torch.where(visible, scores.exp(), 0)
        return exps / exps.sum(dim=-1, keepdim=True)

    plant.replace(reference, "masked_softmax", softmax)


@fault(ATTENTION, check="gradients")
def half_of_a_gradient(plant: Plant) -> None:
    """Half of the gradient of the weights is detached."""

    def softmax(original, *arguments):
        weights = original(*arguments)
        return (weights + weights.detach()) / 2

    plant.wrap(reference, "masked_softmax", softmax)


@fault(SINKS)
def no_soft_cap(plant: Plant) -> None:
    """The soft-cap is missing."""
    call_with(plant, soft_cap=None)


@fault(SINKS)
def soft_cap_after_the_mask(plant: Plant) -> None:
    """The soft-cap comes after the mask, and undoes it."""

    def softmax(original, scores, visible, sinks):
        return original(torch.where(visible, scores, -SOFT_CAP), torch.ones_like(visible), sinks)

    plant.wrap(reference, "masked_softmax", softmax)


@fault(SINKS)
def soft_cap_before_the_bias(plant: Plant) -> None:
    """The soft-cap comes before the bias."""

    def attend(original, query, key, value, bias, *arguments, **options):
        plant.wrap(reference, "masked_softmax", lambda softmax, scores, *rest: softmax(scores + bias, *rest))
        return original(query, key, value, None, *arguments, **options)

    plant.wrap(torch_ref, "dot_product_attention", attend)


@fault(SINKS)
def no_sinks(plant: Plant) -> None:
    """The sinks are missing in the softmax."""
    call_with(plant, sinks=None)


def call_with(plant: Plant, **changes: Any) -> None:
    """Change options of `torch_ref.dot_product_attention`."""
    plant.wrap(torch_ref, "dot_product_attention", lambda attend, *a, **options: attend(*a, **{**options, **changes}))


def _torch_softmax(plant: Plant, hidden: float = -torch.inf, axis: int = -1, dtype: Any = None) -> None:
    def softmax(scores, visible, sinks=None):
        return torch.softmax(torch.where(visible, scores, hidden), axis, dtype).to(scores.dtype)

    plant.replace(reference, "masked_softmax", softmax)
