"""flax.nnx.GRUCell lacks the bias b_hn of its documented formula.

flax.linen.GRUCell and torch.nn.GRUCell have it.
"""

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

torch.manual_seed(0)
theirs, ours = torch.nn.GRUCell(4, 5), nnx.GRUCell(4, 5, rngs=nnx.Rngs(0))
with torch.no_grad():
    theirs.bias_hh[:10] = 0  # in both formulas r and z have one bias, that of the input
ours.dense_i.kernel[...], ours.dense_i.bias[...] = (
    theirs.weight_ih.detach().numpy().T,
    theirs.bias_ih.detach().numpy(),
)
ours.dense_h.kernel[...] = theirs.weight_hh.detach().numpy().T
x, hidden = (
    np.random.default_rng(seed).normal(size=(1, size)).astype(np.float32)
    for seed, size in ((0, 4), (1, 5))
)


def difference():
    """Return the largest difference after one step."""
    new = theirs(torch.tensor(x), torch.tensor(hidden)).detach().numpy()
    return np.abs(np.asarray(ours(jnp.asarray(hidden), jnp.asarray(x))[0]) - new).max()


names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(ours, nnx.Param))]
print("parameters of nnx.GRUCell:", ", ".join(sorted(names)))
print(f"b_hn drawn at random: the new states differ by {difference():.1e}")
with torch.no_grad():
    theirs.bias_hh[10:] = 0
print(f"b_hn = 0: the new states differ by {difference():.1e}")
