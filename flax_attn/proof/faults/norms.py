"""Faults of the norms and of the feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flax_attn.proof.faults.fault import Plant, fault
from torch_ref.modules.norm import LayerNorm, RMSNorm


@fault("block_gpt2")
def another_epsilon(plant: Plant) -> None:
    """The epsilon of a norm is 1e-6, not 1e-5."""
    plant.module.norm1.eps = 1e-6


@fault("block_gpt2")
def swapped_norms(plant: Plant) -> None:
    """The two norms are swapped."""
    plant.module.norm1, plant.module.norm2 = plant.module.norm2, plant.module.norm1


@fault("layer_norm")
def epsilon_outside_the_root(plant: Plant) -> None:
    """The epsilon is added outside the root."""
    _layer_norm(plant, lambda x, eps: x.square().mean(dim=-1, keepdim=True).sqrt() + eps)


@fault("layer_norm")
def unbiased_variance(plant: Plant) -> None:
    """The variance is divided by d - 1, not by d."""
    _layer_norm(plant, lambda x, eps: (x.var(dim=-1, keepdim=True) + eps).sqrt())


@fault("layer_norm")
def swapped_scale_and_shift(plant: Plant) -> None:
    """The scale and the shift of a norm are swapped."""
    plant.module.scale, plant.module.shift = plant.module.shift, plant.module.scale


@fault("layer_norm")
def no_shift(plant: Plant) -> None:
    """The shift of a norm is missing."""
    plant.module.shift.data.zero_()


@fault("rms_norm")
def centred_rms_norm(plant: Plant) -> None:
    """RMSNorm subtracts the mean."""
    plant.wrap(RMSNorm, "forward", lambda norm, self, x: norm(self, x - x.mean(dim=-1, keepdim=True)))


@fault("rms_norm")
def scale_plus_one(plant: Plant) -> None:
    """RMSNorm multiplies by 1 + scale, as in Gemma."""
    plant.module.scale.data += 1


@fault("rms_norm")
def no_epsilon(plant: Plant) -> None:
    """The epsilon of a norm is missing."""
    plant.module.eps = 0.0


@fault("feed_forward_tanh")
def exact_gelu_for_tanh(plant: Plant) -> None:
    """GELU is exact, not the tanh form."""
    plant.module.layers[1] = nn.GELU()


@fault("feed_forward_exact")
def tanh_gelu_for_exact(plant: Plant) -> None:
    """GELU has the tanh form, not the exact one."""
    plant.module.layers[1] = nn.GELU(approximate="tanh")


@fault("feed_forward_exact")
def quick_gelu(plant: Plant) -> None:
    """GELU is x * sigmoid(1.702 x)."""
    plant.replace(nn.GELU, "forward", lambda self, x: x * torch.sigmoid(1.702 * x))


@fault("feed_forward_tanh")
def no_hidden_bias(plant: Plant) -> None:
    """The bias of the hidden layer is missing."""
    plant.module.layers[0].bias.data.zero_()


def _layer_norm(plant: Plant, deviation: Callable[[Tensor, float], Tensor]) -> None:
    def forward(self, x):
        x = x - x.mean(dim=-1, keepdim=True)
        return x / deviation(x, self.eps) * self.scale + self.shift

    plant.replace(LayerNorm, "forward", forward)
