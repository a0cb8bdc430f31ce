"""Gated DeltaNet: the delta rule with one decay a head."""

from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from torch_ref.functional.shapes import Tokens
from torch_ref.modules.decay import DecayRate
from torch_ref.modules.delta_attention import DeltaAttention
from torch_ref.modules.linear import Linear


class GatedDeltaNet(DeltaAttention):
    """Gated DeltaNet, as in Qwen3-Next: one state and one decay per head, and a gated norm.

        decay(x) = -exp(A_log) * softplus(x W_decay + dt_bias)        gate(x) = silu(x W_gate)

    Arguments and errors are those of `DeltaAttention`, which states the rest of the formula.
    Decoding a token takes as long after any number of tokens, and the cache does not grow.

    Example:
        >>> import torch
        >>> layer = GatedDeltaNet(6, 6, num_heads=4, head_dim=3, num_key_heads=2)
        >>> found = layer.attend(torch.ones((2, 5, 6)), cache=layer.init_cache(2, 8))
        >>> found.output.shape, found.cache.state.shape
        (torch.Size([2, 5, 6]), torch.Size([2, 4, 3, 3]))
    """

    def create_parts(self) -> None:
        """Create the projections to decays and gates."""
        self.W_decay = Linear(self.d_in, self.num_heads, False)
        self.W_gate = Linear(self.d_in, self.num_heads * self.value_dim, False)
        self.rate = DecayRate(self.num_heads)

    def decay(self, x: Tokens) -> Float[Tensor, "b t n"]:
        """Return the logarithm of one decay for each head."""
        # One decay a head: without its axis of features.
        return self.rate(self.W_decay(x))[..., 0]

    def gate(self, x: Tokens) -> Float[Tensor, "b t n v"]:
        """Return `silu(x W_gate)`."""
        return functional.silu(rearrange(self.W_gate(x), "b t (n v) -> b t n v", n=self.num_heads))
