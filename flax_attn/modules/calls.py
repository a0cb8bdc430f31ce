"""How attention modules are called, and what they return."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypedDict, cast

from jaxtyping import Array, Float

from flax_attn.functional.cache import KVCache
from flax_attn.functional.masks import Mask
from flax_attn.functional.shapes import ArrayLike

Bias = Float[Array, "..."] | Callable[[Array, Array], Array]
Returned = Array | tuple[Array, Array] | tuple[Array, KVCache] | tuple[Array, Array, KVCache]


class CallOptions(TypedDict, total=False):
    """The keywords of a call that do not change what it returns; see `MultiHeadAttention.__call__`."""

    mask: Mask | Array | None
    bias: Bias | None
    positions: ArrayLike | None
    lengths: ArrayLike | int | None
    dropout_key: Array | None


class Outputs(NamedTuple):
    """What a call can return, each by its name; None is what it was not asked for.

    Args:
        output: `(b, t, d)`.
        weights: `(b, n, t, s)`.
        cache: with the new tokens.
    """

    output: Array
    weights: Array | None = None
    cache: KVCache | None = None

    def pack(self) -> Returned:
        """Return what a call returns: the output, followed by the weights and by the cache, if there are any.

        Example:
            >>> import jax.numpy as jnp
            >>> output, weights = Outputs(jnp.ones(2), weights=jnp.zeros(2)).pack()
        """
        if self.weights is None:
            return self.output if self.cache is None else (self.output, self.cache)
        return (self.output, self.weights) if self.cache is None else (self.output, self.weights, self.cache)


def unpack(returned: Returned, return_weights: bool, cached: bool = False) -> Outputs:
    """Return by name what a call returned that was asked for these: the inverse of `Outputs.pack`.

    Example:
        >>> import jax.numpy as jnp
        >>> unpack(jnp.ones(2), return_weights=False).weights is None
        True
    """
    values = cast(Iterator[Any], iter(returned if return_weights or cached else (returned,)))
    return Outputs(next(values), next(values) if return_weights else None, next(values) if cached else None)
