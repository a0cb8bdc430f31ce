"""Selections of PyTorch among equal values, whose order it does not define."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# Each returns values and their indices. That of the first is defined for `max`, which is none.
SELECTING = (
    aten.topk.default,
    aten.sort.default,
    aten.kthvalue.default,
    aten.median.dim,
)


class OtherTies(TorchDispatchMode):
    """A context in which the last of equal values is taken where PyTorch takes the first.

    Example:
        >>> x = torch.tensor([3.0, 1.0, 1.0])
        >>> with OtherTies():
        ...     values, indices = torch.topk(x, 2)
        >>> values.tolist(), indices.tolist(), torch.topk(x, 2).indices.tolist()
        ([3.0, 1.0], [0, 2], [0, 1])
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        """Call an operation; one that selects, on the values in reverse order."""
        options = kwargs or {}
        # Of a number there is one value.
        if func in SELECTING and args[0].ndim:
            return _reversed(func, args, options)
        return func(*args, **options)


def _reversed(func: Any, args: Any, options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what an operation selects of the values in reverse order, with their own indices."""
    values, *rest = args
    axis = _axis(func, args)
    found, indices = func(values.flip(axis), *rest, **options)
    last = values.shape[axis] - 1
    return found, last - indices


def _axis(func: Any, given: Sequence[Any]) -> int:
    """Return the axis along which an operation selects, the last one by default."""
    names = [argument.name for argument in func._schema.arguments]
    # PyTorch passes all but defaults by position here, however they were given.
    place = names.index("dim")
    return given[place] if place < len(given) else -1
