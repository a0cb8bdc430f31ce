"""Gated DeltaNet: the delta rule with one decay a head."""

from functools import partial
from typing import Any

from einops import rearrange
from jaxtyping import Array, Float

from flax_attn.functional.shapes import Tokens
from flax_attn.modules.decay import DecayRate
from flax_attn.modules.delta_attention import DeltaAttention
from flax_attn.modules.feed_forward import ACTIVATIONS
from flax_attn.modules.linear import Linear


class GatedDeltaNet(DeltaAttention):
    """Gated DeltaNet, as in Qwen3-Next: one state and one decay per head, and a gated norm.

        decay(x) = -exp(A_log) * softplus(x W_decay + dt_bias)        gate(x) = silu(x W_gate)

    Arguments and errors are those of `DeltaAttention`, which states the rest of the formula.
    Decoding a token takes as long after any number of tokens, and the cache does not grow.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = GatedDeltaNet(6, 6, num_heads=4, head_dim=3, num_key_heads=2, rngs=nnx.Rngs(0))
        >>> found = layer.attend(jnp.ones((2, 5, 6)), cache=layer.init_cache(2, 8))
        >>> found.output.shape, found.cache.state.shape
        ((2, 5, 6), (2, 4, 3, 3))

    References:
        Yang et al. 2024 (arXiv:2412.06464).
    """

    def create_parts(self, **numerics: Any) -> None:
        """Create the projections to decays and gates."""
        param_dtype, rngs = numerics["param_dtype"], numerics["rngs"]
        n, v = self.num_heads, self.value_dim
        to_heads = partial(Linear, bias=False, axes=("embed", "heads"), **numerics)
        self.W_decay = to_heads(self.d_in, n)
        # The gate of a head is on the device of the head.
        self.W_gate = to_heads(self.d_in, n * v, unit=(1, v))
        self.rate = DecayRate(n, param_dtype=param_dtype, rngs=rngs)

    def decay(self, x: Tokens) -> Float[Array, "b t n"]:
        """Return the logarithm of one decay for each head."""
        # One decay a head: without its axis of features.
        return self.rate(self.W_decay(x))[..., 0]

    def gate(self, x: Tokens) -> Float[Array, "b t n v"]:
        """Return `silu(x W_gate)`."""
        gate = rearrange(self.W_gate(x), "b t (n v) -> b t n v", n=self.num_heads)
        return ACTIVATIONS["silu"](gate)
