"""equinox.nn.AdaptiveAvgPool1d splits uneven lengths into other windows than PyTorch."""

import equinox
import jax.numpy as jnp
import torch

x = [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]
print("equinox, 7 to 3:", equinox.nn.AdaptiveAvgPool1d(3)(jnp.array(x)).tolist())
print("PyTorch, 7 to 3:", torch.nn.AdaptiveAvgPool1d(3)(torch.tensor(x)).tolist())
print("equinox, 7 to 4:", equinox.nn.AdaptiveAvgPool1d(4)(jnp.array(x)).tolist())
print("PyTorch, 7 to 4:", torch.nn.AdaptiveAvgPool1d(4)(torch.tensor(x)).tolist())
