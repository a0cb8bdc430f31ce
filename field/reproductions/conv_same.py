"""padding="SAME" with a stride pads only the end; padding=1 in PyTorch pads both sides."""

import jax.numpy as jnp
import torch
from flax import nnx

x = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
ours = nnx.Conv(1, 1, (3,), strides=2, padding="SAME", use_bias=False, rngs=nnx.Rngs(0))
ours.kernel[...] = jnp.ones((3, 1, 1))
theirs = torch.nn.Conv1d(1, 1, 3, stride=2, padding=1, bias=False)
torch.nn.init.ones_(theirs.weight)
print("Flax   :", ours(jnp.array(x)[None, :, None])[0, :, 0].tolist())
print("PyTorch:", theirs(torch.tensor([[x]]))[0, 0].tolist())
