"""How attention modules are called, and what they return."""

from collections.abc import Callable
from typing import Any, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor

from torch_ref.functional.cache_base import Cache
from torch_ref.functional.masks import Mask
from torch_ref.functional.outputs import Outputs
from torch_ref.functional.positions import RoPE, as_positions
from torch_ref.functional.shapes import ArrayLike
from torch_ref.modules.typed import TypedModule

Bias = Float[Tensor, "..."] | Callable[[Tensor, Tensor], Tensor]


# As a class, so that type checkers follow options that pass through several layers.
class CallOptions(TypedDict, total=False):
    """Keyword arguments of a call; `MultiHeadAttention.attend` describes them."""

    mask: Mask | Tensor | None
    bias: Bias | None
    positions: ArrayLike | None
    lengths: ArrayLike | int | None
    dropout_key: Tensor | None


class Attention(TypedModule):
    """The attention of a block: a base class.

    `MultiHeadAttention` derives from it, as can your own module that is called in the same way.

    Example:
        >>> from torch_ref import Attention, FeedForward, Outputs, TransformerBlock
        >>> class FirstToken(Attention):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.d_in = self.d_out = width
        ...     def attend(self, query, **options):
        ...         return Outputs(query[..., :1, :] + 0 * query)
        >>> block = TransformerBlock(FirstToken(4), FeedForward(4), None, None)
        >>> block(torch.ones((2, 3, 4))).shape
        torch.Size([2, 3, 4])
    """

    d_in: int
    d_out: int
    context_length: int | None = None
    window: int | None = None
    rope: RoPE | None = None

    def attend(
        self,
        query: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        cache: Any = None,
        return_weights: bool = False,
        dropout_key: Tensor | None = None,
    ) -> Outputs[Any]:
        """Return the output with the weights and the new cache, if requested.

        The arguments are those of `MultiHeadAttention.attend`.
        """
        raise NotImplementedError

    def forward(
        self,
        query: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        dropout_key: Tensor | None = None,
    ) -> Tensor:
        """Return the output of `attend`, which describes the arguments."""
        options: CallOptions = {
            "mask": mask,
            "bias": bias,
            "positions": positions,
            "lengths": lengths,
            "dropout_key": dropout_key,
        }
        return self.attend(query, **options).output

    def init_cache(self, b: int | None, capacity: int, dtype: torch.dtype | None = None) -> Cache:
        """Return an empty cache for `b` sequences of up to `capacity` tokens.

        With `b` None it holds one sequence, without a batch axis.
        """
        raise NotImplementedError


def run_layer(
    layer: Any, *inputs: Any, cache: Any = None, return_weights: bool = False, **options: Any
) -> Outputs[Any]:
    """Return the outputs of an attention layer, a block or what is called like them.

    Where the output alone is requested it is a plain call: that is what hooks observe.
    """
    requested: dict[str, Any] = {}
    # Named only where requested: a layer need not know both.
    if cache is not None:
        requested["cache"] = cache
    if return_weights:
        requested["return_weights"] = True
    if not requested:
        return Outputs(layer(*inputs, **options))
    return layer.attend(*inputs, **requested, **options)


def check_self_attention(
    rope: RoPE | None,
    query: Tensor,
    key: Tensor | None,
    positions: ArrayLike | None,
    cache: Cache | None,
) -> None:
    """Raise where positions have no rope, or where there is a key beside rope or a cache."""
    # Else they would be dropped without a word.
    if rope is None and positions is not None:
        raise ValueError(
            "positions are for rope; got positions, rope=None. Construct the module with"
            " rope=RoPE()"
        )
    # A key of another sequence has positions of its own, which no argument gives.
    if rope is not None and key is not None:
        raise ValueError(
            "rope rotates queries and keys by the positions of one sequence, in self-attention;"
            f" got a key of shape {tuple(key.shape)}. Leave it out, or construct the module with"
            " rope=None"
        )
    if cache is not None and key is not None:
        raise ValueError(
            "a cache holds the keys and values of one sequence, in self-attention; got a key of"
            f" shape {tuple(key.shape)}. Leave out the key, or the cache"
        )
    if positions is not None:
        as_positions(positions, tuple(query.shape)[:-1])
