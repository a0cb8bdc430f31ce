"""How fast a recurrent attention forgets."""

import math

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from flax.typing import Dtype
from jaxtyping import Array, Float

from attn_spec.checks import check_positive
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.modules.initialisation import check_dtypes, next_key, uniform
from flax_attn.sharding.parameters import named


class DecayRate(nnx.Module):
    """The logarithm of a decay, `-exp(A_log) * softplus(x + dt_bias)`, in at least float32.

    Args:
        num_heads: number of heads.
        size: number of decays for each head.
        param_dtype: dtype of the parameters.
        rngs: random streams; parameters are drawn from `params` as Mamba's are: `exp(A_log)`
            between 1 and 16, `softplus(dt_bias)` between 0.001 and 0.1.

    Shapes:
        `(..., num_heads * size)` to `(..., num_heads, size)`; `A_log` is `(num_heads,)`, `dt_bias`
        is `(num_heads * size,)`.

    Raises:
        ValueError: if a size is not positive.

    Example:
        >>> DecayRate(2, 3, rngs=nnx.Rngs(0))(jnp.ones((4, 6))).shape
        (4, 2, 3)

    References:
        Gu and Dao 2023 (arXiv:2312.00752).
    """

    def __init__(
        self, num_heads: int, size: int = 1, *, param_dtype: Dtype = jnp.float32, rngs: nnx.Rngs
    ):
        check_positive(num_heads=num_heads, size=size)
        check_dtypes(param_dtype=param_dtype)
        self.num_heads = num_heads
        draw = uniform(1)
        rate = draw(next_key(rngs.params), (num_heads,), param_dtype)
        step = draw(next_key(rngs.params), (num_heads * size,), param_dtype)
        rate, bias = _as_mamba(rate, step)
        # Logarithms, as what is learned may then be any number, and the rate stays positive.
        self.A_log = nnx.Param(rate, **named("heads"))
        self.dt_bias = nnx.Param(bias, **named("heads", unit=(size,)))

    def __call__(self, x: Float[Array, "*shape d"]) -> Float[Array, "*shape n s"]:
        x = x.astype(accumulation_dtype(x.dtype))
        bias = jnp.asarray(self.dt_bias[...], x.dtype)
        rate = jnp.asarray(self.A_log[...], x.dtype)
        step = jax.nn.softplus(x + jnp.broadcast_to(bias, x.shape))
        step = rearrange(step, "... (n s) -> ... n s", n=self.num_heads)
        return step * jnp.broadcast_to(-jnp.exp(rate)[:, None], step.shape)


@jax.jit
def _as_mamba(rate: Float[Array, " n"], step: Float[Array, " ns"]) -> tuple[Array, Array]:
    """Return `A_log` and `dt_bias` from numbers that are uniform in [-1, 1)."""
    low, high = math.log(0.001), math.log(0.1)
    rate = 1 + 15 * ((rate + 1) / 2)
    step = jnp.exp(low + (high - low) * ((step + 1) / 2))
    return jnp.log(rate), step + jnp.log(-jnp.expm1(-step))
