"""flax's BatchNorm keeps the biased running variance; PyTorch divides by n - 1."""

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

x = np.random.default_rng(0).normal(size=(8, 1)).astype(np.float32)
ours, theirs = (
    nnx.BatchNorm(1, momentum=0.0, rngs=nnx.Rngs(0)),
    torch.nn.BatchNorm1d(1, momentum=1.0),
)
ours(jnp.asarray(x), use_running_average=False)
theirs(torch.tensor(x))
print(f"Flax {float(ours.var[0]):.6f}, PyTorch {float(theirs.running_var):.6f}")
print(f"var(x) {x.var():.6f}, divided by n - 1 {x.var(ddof=1):.6f}")
