"""Kimi Delta Attention: the delta rule with a decay for each feature of a key."""

from functools import partial
from typing import Any

import jax
from einops import rearrange
from jaxtyping import Array, Float

from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.shapes import Tokens
from flax_attn.modules.decay import DecayRate
from flax_attn.modules.delta_attention import DeltaAttention
from flax_attn.modules.linear import Linear


class KimiDeltaAttention(DeltaAttention):
    """Kimi Delta Attention: `GatedDeltaNet` with a decay per key feature and a sigmoid gate.

        decay(x) = -exp(A_log) * softplus(x W_decay_down W_decay_up + dt_bias)
        gate(x) = sigmoid(x W_gate_down W_gate_up)

    Both projections have the rank of a head's width. Arguments and errors are those of
    `DeltaAttention`, which states the rest of the formula.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = KimiDeltaAttention(6, 6, num_heads=2, head_dim=4, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 5, 6))).shape
        (2, 5, 6)

    References:
        Kimi Team 2025 (arXiv:2510.26692).
    """

    def create_parts(self, **numerics: Any) -> None:
        """Create the projections to decays and gates."""
        param_dtype, rngs = numerics["param_dtype"], numerics["rngs"]
        n, h, v = self.num_heads, self.head_dim, self.value_dim
        # The narrow middle is whole on every device: it is no wider than a head.
        down = partial(Linear, bias=False, axes=("embed", None), **numerics)
        up = partial(Linear, bias=False, axes=(None, "heads"), **numerics)
        self.W_decay_down = down(self.d_in, h)
        self.W_decay_up = up(h, n * h, unit=(1, h))
        self.W_gate_down = down(self.d_in, v)
        self.W_gate_up = up(v, n * v, unit=(1, v))
        self.rate = DecayRate(n, h, param_dtype=param_dtype, rngs=rngs)

    def decay(self, x: Tokens) -> Float[Array, "b t n h"]:
        """Return the logarithm of one decay for each feature of a key."""
        # Of low rank, as a full matrix for a decay of each feature would be as large as a
        # projection.
        return self.rate(self.W_decay_up(self.W_decay_down(x)))

    def gate(self, x: Tokens) -> Float[Array, "b t n v"]:
        """Return `sigmoid(x W_gate_down W_gate_up)`."""
        gate = self.W_gate_up(self.W_gate_down(x))
        gate = rearrange(gate, "b t (n v) -> b t n v", n=self.num_heads)
        # As PyTorch does: the formula of a lower dtype rounds after each of its steps.
        wide = gate.astype(accumulation_dtype(gate.dtype))
        return jax.nn.sigmoid(wide).astype(gate.dtype)
