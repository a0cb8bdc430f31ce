"""Faults of the optimizer: the module is right, and its training differs."""

from dataclasses import replace

import torch

from flax_attn.parity.training import Recipe
from flax_attn.proof.faults.fault import Patch, Wrap, fault

VARIANT = "feed_forward_tanh"


def recipe_patch(**changes):
    """Return the patch that trains PyTorch by a recipe with these changes."""
    return Wrap(
        Recipe,
        "torch",
        lambda torch, recipe, parameters: torch(replace(recipe, **changes), parameters),
    )


def without_decay_of_biases(torch, recipe, parameters):
    """The optimizer of a recipe, with weight decay of matrices alone."""
    parameters = list(parameters)
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    return torch(recipe, [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])


class Uncorrected(torch.optim.AdamW):
    """AdamW without bias correction, as the first BERT was trained."""

    @torch.no_grad()
    def step(self, closure=None):
        """Take one step."""
        for group in self.param_groups:
            rate = group["lr"]
            slow, slower = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                gradient = parameter.grad
                mean = state.setdefault("mean", torch.zeros_like(gradient))
                square = state.setdefault("square", torch.zeros_like(gradient))
                mean.lerp_(gradient, 1 - slow)
                square.lerp_(gradient.square(), 1 - slower)
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.sub_(rate * mean / (square.sqrt() + group["eps"]))


FAULTS = (
    fault("l2_for_weight_decay", "Weight decay is L2, not decoupled.", VARIANT,
          recipe_patch(optimizer="adam"), check="training"),
    fault("another_epsilon_of_adam", "The epsilon of Adam is 1e-6, not 1e-8.", VARIANT,
          recipe_patch(eps=1e-6), check="training"),
    fault("swapped_betas", "The betas of Adam are swapped.", VARIANT,
          recipe_patch(betas=Recipe().betas[::-1]), check="training"),
    fault("another_default_of_weight_decay",
          "Weight decay is 1e-4, optax's default, not 1e-2.", VARIANT,
          recipe_patch(weight_decay=1e-4), check="training"),
    fault("biases_do_not_decay", "Weight decay leaves out the biases.", VARIANT,
          Wrap(Recipe, "torch", without_decay_of_biases), check="training"),
    fault("no_bias_correction", "Adam has no bias correction.", VARIANT,
          Patch(torch.optim, "AdamW", Uncorrected), check="training"),
)  # fmt: skip
