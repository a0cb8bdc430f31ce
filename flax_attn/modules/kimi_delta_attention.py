"""Kimi Delta Attention: the delta rule with a decay for each feature of a key."""

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

    Both projections have the rank of a head's width. The arguments are those of `DeltaAttention`,
    which states the rest of the formula.

    Raises:
        ValueError: where `DeltaAttention` does.

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
        of_rate = {name: numerics[name] for name in ("param_dtype", "rngs")}
        n, h, v = self.num_heads, self.head_dim, self.value_dim
        down, up = ("embed", None), (None, "heads")
        self.W_decay_down = Linear(self.d_in, h, False, axes=down, **numerics)
        self.W_decay_up = Linear(h, n * h, False, axes=up, unit=(1, h), **numerics)
        self.W_gate_down = Linear(self.d_in, v, False, axes=down, **numerics)
        self.W_gate_up = Linear(v, n * v, False, axes=up, unit=(1, v), **numerics)
        self.rate = DecayRate(n, h, **of_rate)

    def decay(self, x: Tokens) -> Float[Array, "b t n h"]:
        """Return the logarithm of one decay for each feature of a key."""
        return self.rate(self.W_decay_up(self.W_decay_down(x)))

    def gate(self, x: Tokens) -> Float[Array, "b t n v"]:
        """Return `sigmoid(x W_gate_down W_gate_up)`."""
        gate = rearrange(
            self.W_gate_up(self.W_gate_down(x)), "b t (n v) -> b t n v", n=self.num_heads
        )
        return jax.nn.sigmoid(gate.astype(accumulation_dtype(gate.dtype))).astype(gate.dtype)
