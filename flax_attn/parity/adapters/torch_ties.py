"""Selections of PyTorch among equal values, whose order it does not define."""

from __future__ import annotations

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
        kwargs = kwargs or {}
        given: dict[str, Any] = {}
        for i, argument in enumerate(func._schema.arguments):
            given[argument.name] = args[i] if i < len(args) else kwargs.get(argument.name)
        values = given.get("self")
        if values is None or func not in SELECTING or not values.ndim:
            return func(*args, **kwargs)
        axis = -1 if given.get("dim") is None else given["dim"]
        found, indices = func(values.flip(axis), *args[1:], **kwargs)
        return found, values.shape[axis] - 1 - indices
