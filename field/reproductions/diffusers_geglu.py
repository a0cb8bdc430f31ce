"""Two Flax layers of diffusers differ from PyTorch in GELU and epsilon.

These are FlaxGEGLU and FlaxTransformer2DModel.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers.models.activations import GEGLU
from diffusers.models.attention_flax import FlaxGEGLU, FlaxTransformer2DModel
from diffusers.models.transformers.transformer_2d import Transformer2DModel

x = np.random.default_rng(0).normal(size=(1, 5, 4)).astype(np.float32)
weight = np.random.default_rng(1).normal(size=(4, 32)).astype(np.float32)
theirs = GEGLU(4, 16, bias=False)  # Flax makes it four times as wide as its input
with torch.no_grad():
    theirs.proj.weight.copy_(torch.tensor(weight.T))
    original = theirs(torch.tensor(x)).numpy()
port = FlaxGEGLU(4).apply({"params": {"proj": {"kernel": weight, "bias": jnp.zeros(32)}}}, x)
hidden, gate = np.split(x @ weight, 2, axis=-1)
print(f"GEGLU differs by {np.abs(port - original).max():.1e}")
print(
    "  from its formula with the tanh GELU by"
    f" {np.abs(port - hidden * jax.nn.gelu(gate)).max():.1e}"
)
print(
    "  and PyTorch from that with the exact one by"
    f" {np.abs(original - hidden * jax.nn.gelu(gate, False)).max():.1e}"
)
print(
    "GroupNorm of Transformer2DModel: eps =",
    Transformer2DModel(4, 8, 32, cross_attention_dim=24).norm.eps,
)
bound = FlaxTransformer2DModel(32, 4, 8).bind({"params": {}})
print("GroupNorm of FlaxTransformer2DModel: epsilon =", bound.norm.epsilon)
