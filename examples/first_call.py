"""The first call of a newcomer: a layer, its output and its weights, and which backend computes it.

python examples/first_call.py
"""

import sys

import jax
import jax.numpy as jnp
from flax import nnx

import flax_attn
from flax_attn import Mask, MultiHeadAttention, explain

layer = MultiHeadAttention(
    64, 64, context_length=256, dropout=0.0, num_heads=4, num_kv_heads=2, rngs=nnx.Rngs(0)
)
x = jax.random.normal(jax.random.key(0), (2, 10, 64))
attended = nnx.jit(lambda layer, x: layer.attend(x, return_weights=True))(layer, x)
output, weights = attended.output, attended.weights
assert output.shape == (2, 10, 64)
assert weights.shape == (2, 4, 10, 10)
assert jnp.allclose(weights.sum(axis=-1), 1, atol=1e-6)
print(
    f"flax_attn {flax_attn.__version__}, jax {jax.__version__}, Python {sys.version.split()[0]}:"
    f" {output.shape}"
)

heads = jnp.ones((2, 10, 4, 16))
print(explain(heads, heads, heads, mask=Mask.causal()))
