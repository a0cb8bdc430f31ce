"""Faults of the norm over each head of queries and keys, and of the width of a head."""

from __future__ import annotations

from torch import nn

from flax_attn.proof.faults.fault import Plant, fault
from torch_ref.modules.multi_head import MultiHeadAttention
from torch_ref.modules.norm import RMSNorm


@fault("multi_head_qk_norm")
def no_head_norm(plant: Plant) -> None:
    """The norm of queries and keys is missing."""
    plant.module.q_norm = plant.module.k_norm = None


@fault("multi_head_qk_norm")
def swapped_head_norms(plant: Plant) -> None:
    """The norms of queries and keys are swapped."""
    plant.module.q_norm, plant.module.k_norm = plant.module.k_norm, plant.module.q_norm


@fault("multi_head_qk_norm")
def head_norm_after_rope(plant: Plant) -> None:
    """Heads are normed after RoPE has turned them."""
    plant.module.late = nn.ModuleList([plant.module.q_norm, plant.module.k_norm])
    plant.module.q_norm = plant.module.k_norm = nn.Identity()

    def project(original, module, *inputs):
        query, key, value = original(module, *inputs)
        return module.late[0](query), module.late[1](key), value

    plant.wrap(MultiHeadAttention, "_project", project)


@fault("multi_head_qk_norm")
def norm_over_all_heads(plant: Plant) -> None:
    """The norm is over all heads together, not each."""

    def forward(self, x):
        return x * (x.square().mean(dim=(-2, -1), keepdim=True) + self.eps).rsqrt() * self.scale

    plant.replace(RMSNorm, "forward", forward)


@fault("multi_head_qk_norm")
def another_head_epsilon(plant: Plant) -> None:
    """The epsilon of the norm over heads is 1e-6."""
    plant.module.q_norm.eps = plant.module.k_norm.eps = 1e-6


@fault("multi_head_qk_norm")
def scale_of_another_width(plant: Plant) -> None:
    """Scores are scaled by d_out / heads, not head_dim."""
    plant.module.scale = (plant.module.d_out / plant.module.num_heads) ** -0.5
