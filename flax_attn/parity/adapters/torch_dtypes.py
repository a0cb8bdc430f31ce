"""The dtypes in which PyTorch really computes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Widenings(TorchDispatchMode):
    """Keep the operations that make float64 of a lower floating dtype.

    Example:
        >>> with Widenings() as found:
        ...     _ = torch.ones(2, dtype=torch.bfloat16).double()
        >>> found.operations
        ['_to_copy']
    """

    def __init__(self):
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        """Call an operation, and keep its name if it widens."""
        result = func(*args, **(kwargs or {}))
        made = any(tensor.dtype == torch.float64 for tensor in _floating(result))
        lower = any(tensor.dtype != torch.float64 for tensor in _floating([args, kwargs]))
        if made and lower:
            self.operations.append(func.overloadpacket.__name__)
        return result


def _floating(tree: Any) -> list[torch.Tensor]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.is_floating_point()]
