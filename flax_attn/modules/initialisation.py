"""How parameters are drawn: as `torch.nn.Linear` draws its own."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jaxtyping import Array

from flax_attn.functional.checks import check_dtype


def check_rngs(rngs: nnx.Rngs | None) -> nnx.Rngs:
    """Return the streams that parameters are drawn from; raise if they are missing."""
    if not isinstance(rngs, nnx.Rngs) or not ("params" in rngs or "default" in rngs):
        raise ValueError(
            f"rngs is missing: the parameters are drawn from its stream 'params'; got {type(rngs).__name__}. "
            "Pass rngs=nnx.Rngs(0)"
        )
    return rngs


def check_dtypes(**dtypes: Dtype | None) -> None:
    """Raise unless each, by its keyword, is a dtype that calls may have, or None."""
    for name, dtype in dtypes.items():
        try:
            known = dtype if dtype is None else jnp.dtype(dtype)
        except TypeError:  # which numpy raises for what is no dtype
            known = f"{dtype!r}"
        if known is not None:
            check_dtype(name, known, remedy=f"Pass {name}=jnp.bfloat16, or another of them")


def uniform(d_in: int) -> Callable[[Array, tuple[int, ...], Dtype], Array]:
    """Return what draws the parameters of a linear layer from `d_in` features."""

    def draw(key: Array, shape: tuple[int, ...], dtype: Dtype) -> Array:
        return jax.random.uniform(key, shape, dtype, -(d_in**-0.5), d_in**-0.5)

    return draw
