"""What PyTorch makes in float32 in a call whose parameters and inputs are in float64.

A model makes numbers of its own, such as positions or a first state. Without a dtype they have
PyTorch's default one, float32, where JAX's default in a float64 run is float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flax_attn.parity.adapters.adapter import Float32


@contextmanager
def reading(kind: Float32) -> Iterator[None]:
    """Read float32 in one of these ways.

    Example:
        >>> with reading(Float32.BY_LIBRARY):
        ...     torch.ones(2).dtype, torch.ones(2, dtype=torch.float32).dtype
        (torch.float64, torch.float32)
        >>> with reading(Float32.NAMED):
        ...     torch.ones(2).float().dtype, torch.ones(2, dtype=torch.float32).dtype
        (torch.float64, torch.float64)
    """
    if kind is Float32.AS_WRITTEN:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64() if kind is Float32.NAMED else nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


class _Float64(TorchFunctionMode):
    """Give every function of PyTorch float64 where it is given float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        given = [_wider(value) for value in args]
        named = {name: _wider(value) for name, value in (kwargs or {}).items()}
        return func(*given, **named)


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
