"""What a call returns that is asked for more than its output."""

from dataclasses import dataclass
from typing import Generic, TypeVar, no_type_check

import jax
from jaxtyping import Array

from flax_attn.functional.cache_base import Cache

C = TypeVar("C", bound=Cache | tuple[Cache, ...])


@jax.tree_util.register_dataclass
@no_type_check  # JAX also builds it of placeholders
@dataclass(frozen=True)
class Outputs(Generic[C]):
    """The values that `attend` returns; those not requested are None. It is a pytree.

    Args:
        output: output of the call, such as `(b, t, d)` of a layer.
        weights: attention weights that were applied to the values, `(b, n, t, s)`.
        cache: cache with the new tokens: that of a layer, or a tuple of those of all layers.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax_attn import Mask, attend
        >>> x = jnp.ones((2, 5, 4, 8))
        >>> attended = attend(x, x, x, mask=Mask.causal(), return_weights=True)
        >>> attended.output.shape, attended.weights.shape, attended.cache
        ((2, 5, 4, 8), (2, 4, 5, 5), None)
    """

    output: Array
    weights: Array | None = None
    cache: C | None = None
