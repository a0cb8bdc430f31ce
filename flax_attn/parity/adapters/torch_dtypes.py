"""The dtypes in which PyTorch really computes."""

from __future__ import annotations

from traceback import walk_stack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flax_attn.parity.trace.program import place_of

# Operations of PyTorch by the function that they take.
FUNCTIONS = {
    "exp": "exp",
    "exp_": "exp",
    "_softmax": "exp",
    "_safe_softmax": "exp",
    "_log_softmax": "exp",
    "logsumexp": "exp",
    "log": "log",
    "log_": "log",
    "rsqrt": "sqrt",
    "rsqrt_": "sqrt",
    "sqrt": "sqrt",
    "native_layer_norm": "sqrt",
    "native_group_norm": "sqrt",
    "sin": "sin",
    "cos": "cos",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
}


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


class FunctionDtypes(TorchDispatchMode):
    """Keep which functions are taken in a lower dtype, and which in a wider one.

    Args:
        dtype: name of the lower dtype.

    Example:
        >>> with FunctionDtypes("bfloat16") as found:
        ...     _ = torch.ones(2, dtype=torch.bfloat16).float().softmax(-1)
        >>> [(name, low) for name, low, _ in found.taken]
        [('exp', False)]
    """

    def __init__(self, dtype: str):
        super().__init__()
        self.taken: list[tuple[str, bool, str]] = []
        self._dtype = getattr(torch, dtype)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        """Call an operation, and keep the function that it takes, with its line."""
        name = FUNCTIONS.get(func.overloadpacket.__name__)
        operands = _floating(args)
        if name and operands:
            low = operands[0].dtype == self._dtype
            self.taken.append((name, low, _caller()))
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    """Return the line of the user that runs an operation."""
    frames = []
    for frame, line in walk_stack(None):
        file = frame.f_code.co_filename
        # This file belongs to the harness, where the search for a user's line ends.
        if file != __file__:
            frames.append((file, line))
    return str(place_of(frames) or "a line that is not known")


def _floating(tree: Any) -> list[torch.Tensor]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.is_floating_point()]
