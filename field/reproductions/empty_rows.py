"""A query that may see no key: jax.nn and Flax return the mean of all values, PyTorch 0."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

x = np.random.default_rng(0).normal(size=(1, 3, 1, 2)).astype(np.float32)
mask = np.zeros((1, 1, 3, 3), bool)
print("mean of the values:", x[0, :, 0].mean(0).round(4))
print(
    "jax.nn            :",
    jax.nn.dot_product_attention(x, x, x, mask=jnp.asarray(mask))[0, 0, 0].round(4),
)
print(
    "flax.nnx          :",
    nnx.dot_product_attention(x, x, x, mask=jnp.asarray(mask))[0, 0, 0].round(4),
)
tensor = torch.tensor(x).transpose(1, 2)
found = torch.nn.functional.scaled_dot_product_attention(
    tensor, tensor, tensor, attn_mask=torch.tensor(mask)
)
print("PyTorch           :", found[0, 0, 0].numpy())
