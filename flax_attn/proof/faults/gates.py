"""Faults of the gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from flax_attn.proof.faults.fault import Plant, fault
from torch_ref.modules.feed_forward import GatedFeedForward


@fault("swiglu")
def gate_and_up_swapped(plant: Plant) -> None:
    """The gate and what it opens are swapped."""
    plant.module.W_gate, plant.module.W_up = plant.module.W_up, plant.module.W_gate


@fault("swiglu")
def gelu_for_silu(plant: Plant) -> None:
    """The activation of SwiGLU is GELU, not SiLU."""
    plant.module.activation = nn.GELU()


@fault("swiglu")
def activation_of_both(plant: Plant) -> None:
    """The activation is on both branches."""
    _hidden(plant, lambda ff, x: ff.activation(ff.W_gate(x)) * ff.activation(ff.W_up(x)))


@fault("swiglu")
def activation_of_the_product(plant: Plant) -> None:
    """The activation comes after the product."""
    _hidden(plant, lambda ff, x: ff.activation(ff.W_gate(x) * ff.W_up(x)))


@fault("swiglu")
def sigmoid_for_silu(plant: Plant) -> None:
    """The gate is a sigmoid, as in the first GLU."""
    plant.module.activation = nn.Sigmoid()


@fault("geglu")
def exact_gelu_in_the_gate(plant: Plant) -> None:
    """The gate's GELU is exact, not the tanh form."""
    plant.module.activation = nn.GELU()


def _hidden(plant: Plant, hidden: Callable) -> None:
    plant.replace(GatedFeedForward, "forward", lambda self, x: self.W_down(hidden(self, x)))
