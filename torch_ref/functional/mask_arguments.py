"""What the constructors of masks take, checked."""

from numbers import Integral
from typing import Any, overload

import torch
from torch import Tensor

from torch_ref.functional.mask_part import Count
from torch_ref.functional.shapes import ArrayLike


def as_booleans(array: Any) -> Tensor:
    """Return a boolean array, or raise `ValueError`."""
    array = torch.as_tensor(array)
    if array.dtype != torch.bool:
        raise ValueError(
            f"mask must be boolean, True = attend; got dtype {array.dtype}. "
            "To add numbers to the scores pass them as bias; for 0/1 integers write mask.bool()"
        )
    return array


@overload
def as_integers(name: str, values: None) -> None: ...


@overload
def as_integers(name: str, values: Count | ArrayLike) -> Count: ...


@overload
def as_integers(name: str, values: Count | ArrayLike | None) -> Count | None: ...


def as_integers(name: str, values: Any) -> int | Tensor | None:
    """Return an integer or None as it is, and all else as an array of integers, or raise `ValueError`."""
    if values is None or (isinstance(values, Integral) and not isinstance(values, bool)):
        return values if values is None else int(values)
    values = torch.as_tensor(values)
    if values.is_floating_point() or values.dtype == torch.bool:
        raise ValueError(f"{name} must be integers; got dtype {values.dtype}. Cast them before the call")
    return values
