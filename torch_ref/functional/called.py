"""Functions of indices, called on tensors of indices.

Only in torch_ref: JAX traces a function on scalars.
"""

from typing import Any

import torch
from torch import Tensor

from attn_spec.function_checks import check_single, needs_values


def called(what: str, function: Any, *arguments: Any) -> Tensor:
    """Return what a function returns, as a tensor, or raise `ValueError`."""
    try:
        result = function(*arguments)
    except (RuntimeError, TypeError) as error:
        if _asks_for_values(error):
            raise needs_values(what, error) from error
        raise
    is_one = isinstance(result, Tensor | bool | float)
    check_single(what, result, is_one)
    # A function that reads no index may return a number of Python.
    device = arguments[-1].device
    return torch.as_tensor(result, device=device)


def _asks_for_values(error: Exception) -> bool:
    # PyTorch has no class of its own for a tensor that is asked for its value.
    message = str(error)
    return "Boolean value of Tensor" in message or "can be converted" in message


def broadcast_size(*arrays: Any) -> tuple[int, ...]:
    """Return the sizes that arrays broadcast to."""
    return tuple(torch.broadcast_shapes(*(x.shape for x in arrays)))
