"""How parameters are drawn: as `torch.nn.Linear` draws its own."""

from collections.abc import Callable

import jax
from flax import nnx
from flax.typing import Dtype
from jaxtyping import Array


def check_rngs(rngs: nnx.Rngs | None) -> nnx.Rngs:
    """Return the streams that parameters are drawn from; raise if they are missing."""
    if not isinstance(rngs, nnx.Rngs) or not ("params" in rngs or "default" in rngs):
        raise ValueError(
            f"rngs is missing: the parameters are drawn from its stream 'params'; got {type(rngs).__name__}. "
            "Pass rngs=nnx.Rngs(0)"
        )
    return rngs


def uniform(d_in: int) -> Callable[[Array, tuple[int, ...], Dtype], Array]:
    """Return what draws the parameters of a linear layer from `d_in` features."""

    def draw(key: Array, shape: tuple[int, ...], dtype: Dtype) -> Array:
        return jax.random.uniform(key, shape, dtype, -(d_in**-0.5), d_in**-0.5)

    return draw
