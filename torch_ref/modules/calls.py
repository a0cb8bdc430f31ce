"""How attention modules are called, and what they return."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypedDict, cast

from jaxtyping import Float
from torch import Tensor

from torch_ref.functional.cache import KVCache
from torch_ref.functional.masks import Mask
from torch_ref.functional.shapes import ArrayLike

Bias = Float[Tensor, "..."] | Callable[[Tensor, Tensor], Tensor]
Returned = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, KVCache] | tuple[Tensor, Tensor, KVCache]


class CallOptions(TypedDict, total=False):
    """The keywords of a call that do not change what it returns; see `MultiHeadAttention.forward`."""

    mask: Mask | Tensor | None
    bias: Bias | None
    positions: ArrayLike | None
    lengths: ArrayLike | int | None
    dropout_key: Tensor | None


class Outputs(NamedTuple):
    """What a call can return, each by its name; None is what it was not asked for.

    Args:
        output: `(b, t, d)`.
        weights: `(b, n, t, s)`.
        cache: with the new tokens.
    """

    output: Tensor
    weights: Tensor | None = None
    cache: KVCache | None = None

    def pack(self) -> Returned:
        """Return what a call returns: the output, followed by the weights and by the cache, if there are any.

        Example:
            >>> import torch
            >>> output, weights = Outputs(torch.ones(2), weights=torch.zeros(2)).pack()
        """
        if self.weights is None:
            return self.output if self.cache is None else (self.output, self.cache)
        return (self.output, self.weights) if self.cache is None else (self.output, self.weights, self.cache)


def unpack(returned: Returned, return_weights: bool, cached: bool = False) -> Outputs:
    """Return by name what a call returned that was asked for these: the inverse of `Outputs.pack`.

    Example:
        >>> import torch
        >>> unpack(torch.ones(2), return_weights=False).weights is None
        True
    """
    values = cast(Iterator[Any], iter(returned if return_weights or cached else (returned,)))
    return Outputs(next(values), next(values) if return_weights else None, next(values) if cached else None)
