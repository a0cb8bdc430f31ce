"""Faults of dropout on the attention weights."""

from __future__ import annotations

import torch

from flax_attn.proof.faults.fault import Plant, fault
from torch_ref.functional import reference


@fault("multi_head_causal", check="dropout")
def kept_weights_not_rescaled(plant: Plant) -> None:
    """Weights that are kept are not rescaled."""
    plant.replace(reference, "drop", lambda weights, keep, rate: torch.where(keep, weights, 0))


@fault("multi_head_causal", check="dropout")
def dropout_shared_by_heads(plant: Plant) -> None:
    """All heads drop the same weights."""
    plant.wrap(reference, "keep_grid", lambda keep_grid, *arguments: keep_grid(*arguments)[:, :1])


@fault("multi_head_causal", check="dropout")
def dropout_shared_by_examples(plant: Plant) -> None:
    """All examples of a batch drop the same weights."""
    plant.wrap(reference, "keep_grid", lambda keep_grid, *arguments: keep_grid(*arguments)[:1])


@fault("multi_head_causal", check="dropout")
def rate_of_what_is_kept(plant: Plant) -> None:
    """The rate is taken for the probability to keep."""
    plant.module.dropout.rate = 1 - plant.module.dropout.rate


@fault("multi_head_causal", check="dropout")
def no_dropout_of_weights(plant: Plant) -> None:
    """The attention weights are not dropped."""
    plant.module.dropout.rate = 0.0
