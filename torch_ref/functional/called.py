"""Functions of indices, called on tensors of indices.

Only in torch_ref: JAX traces a function on scalars.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_spec.function_checks import check_single, needs_values


def called(what: str, function: Any, *arguments: Any) -> torch.Tensor:
    """Return what a function returns, as a tensor, or raise `ValueError`."""
    try:
        result = function(*arguments)
    except (RuntimeError, TypeError) as error:
        # PyTorch has no class of its own for a tensor that is asked for its value.
        message = str(error)
        if "Boolean value of Tensor" in message or "can be converted" in message:
            raise needs_values(what, error) from error
        raise
    is_one = isinstance(result, torch.Tensor | bool | float)
    check_single(what, result, is_one)
    return torch.as_tensor(result, device=arguments[-1].device)


def broadcast_size(*arrays: Any) -> tuple[int, ...]:
    """Return the sizes that arrays broadcast to."""
    return tuple(torch.broadcast_shapes(*(x.shape for x in arrays)))
