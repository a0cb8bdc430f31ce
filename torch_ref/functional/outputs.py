"""What a call returns that is asked for more than its output."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from torch_ref.functional.cache_base import Cache

C = TypeVar("C", bound=Cache | tuple[Cache, ...])


@dataclass(frozen=True)
class Outputs(Generic[C]):
    """The values that `attend` returns; those not requested are None.

    Example:
        >>> import torch
        >>> from torch_ref import Mask, attend
        >>> x = torch.ones((2, 5, 4, 8))
        >>> attended = attend(x, x, x, mask=Mask.causal(), return_weights=True)
        >>> attended.output.shape, attended.weights.shape, attended.cache
        (torch.Size([2, 5, 4, 8]), torch.Size([2, 4, 5, 5]), None)
    """

    output: Tensor
    weights: Tensor | None = None
    cache: C | None = None
