"""Faults of the optimizer: the model is right, and learns something else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flax_attn.parity.training import Recipe
from flax_attn.proof.faults.fault import Plant, fault

MODEL = "feed_forward_tanh"


@fault(MODEL, check="training")
def l2_for_weight_decay(plant: Plant) -> None:
    """Weight decay is L2, not decoupled."""
    _recipe(plant, optimizer="adam")


@fault(MODEL, check="training")
def another_epsilon_of_adam(plant: Plant) -> None:
    """The epsilon of Adam is 1e-6, not 1e-8."""
    _recipe(plant, eps=1e-6)


@fault(MODEL, check="training")
def swapped_betas(plant: Plant) -> None:
    """The betas of Adam are swapped."""
    _recipe(plant, betas=Recipe().betas[::-1])


@fault(MODEL, check="training")
def another_default_of_weight_decay(plant: Plant) -> None:
    """Weight decay is 1e-4, optax's default, not 1e-2."""
    _recipe(plant, weight_decay=1e-4)


@fault(MODEL, check="training")
def biases_do_not_decay(plant: Plant) -> None:
    """Weight decay leaves out the biases."""

    def without_biases(original, recipe, parameters):
        vectors, matrices = [], []
        for parameter in parameters:
            (vectors if parameter.ndim < 2 else matrices).append(parameter)
        return original(recipe, [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])

    plant.wrap(Recipe, "torch", without_biases)


@fault(MODEL, check="training")
def no_bias_correction(plant: Plant) -> None:
    """Adam has no bias correction."""
    plant.replace(torch.optim, "AdamW", Uncorrected)


class Uncorrected(torch.optim.AdamW):
    """AdamW without bias correction, as the first BERT was trained."""

    @torch.no_grad()
    def step(self, closure=None):
        """Take one step."""
        for group in self.param_groups:
            rate, (slow, slower) = group["lr"], group["betas"]
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                mean = state.setdefault("mean", torch.zeros_like(gradient)).lerp_(gradient, 1 - slow)
                square = state.setdefault("square", torch.zeros_like(gradient)).lerp_(gradient.square(), 1 - slower)
                parameter.mul_(1 - rate * group["weight_decay"]).sub_(rate * mean / (square.sqrt() + group["eps"]))


def _recipe(plant: Plant, **changes: Any) -> None:
    plant.wrap(Recipe, "torch", lambda torch, recipe, parameters: torch(replace(recipe, **changes), parameters))
