"""Kimi Delta Attention: the delta rule with a decay for each feature of a key."""

from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from torch_ref.functional.shapes import Tokens
from torch_ref.modules.decay import DecayRate
from torch_ref.modules.delta_attention import DeltaAttention
from torch_ref.modules.linear import Linear


class KimiDeltaAttention(DeltaAttention):
    """Kimi Delta Attention: `GatedDeltaNet` with a decay per key feature and a sigmoid gate.

        decay(x) = -exp(A_log) * softplus(x W_decay_down W_decay_up + dt_bias)
        gate(x) = sigmoid(x W_gate_down W_gate_up)

    Both projections have the rank of a head's width. Arguments and errors are those of
    `DeltaAttention`, which states the rest of the formula.

    Example:
        >>> import torch
        >>> layer = KimiDeltaAttention(6, 6, num_heads=2, head_dim=4)
        >>> layer(torch.ones((2, 5, 6))).shape
        torch.Size([2, 5, 6])
    """

    def create_parts(self) -> None:
        """Create the projections to decays and gates."""
        n, h, v = self.num_heads, self.head_dim, self.value_dim
        self.W_decay_down = Linear(self.d_in, h, False)
        self.W_decay_up = Linear(h, n * h, False)
        self.W_gate_down = Linear(self.d_in, v, False)
        self.W_gate_up = Linear(v, n * v, False)
        self.rate = DecayRate(n, h)

    def decay(self, x: Tokens) -> Float[Tensor, "b t n h"]:
        """Return the logarithm of one decay for each feature of a key."""
        # Of low rank, as a full matrix for a decay of each feature would be as large as a
        # projection.
        return self.rate(self.W_decay_up(self.W_decay_down(x)))

    def gate(self, x: Tokens) -> Float[Tensor, "b t n v"]:
        """Return `sigmoid(x W_gate_down W_gate_up)`."""
        gate = self.W_gate_up(self.W_gate_down(x))
        gate = rearrange(gate, "b t (n v) -> b t n v", n=self.num_heads)
        return gate.sigmoid()
