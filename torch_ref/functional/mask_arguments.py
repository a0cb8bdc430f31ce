"""The arguments of mask constructors, checked and in one integer type."""

from numbers import Integral
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from torch_ref.functional.mask_part import Count
from torch_ref.functional.shapes import ArrayLike

_LARGEST = 2**63 - 1


def as_booleans(array: Any) -> Tensor:
    """Return a boolean array, or raise `ValueError`."""
    array = as_array("mask", array)
    if array.dtype != torch.bool:
        raise ValueError(
            f"mask must be boolean, True = attend; got dtype {array.dtype}. "
            "To add numbers to the scores pass them as bias; for 0/1 integers write mask.bool()"
        )
    return array


@overload
def as_integers(name: str, values: Count | ArrayLike) -> Count: ...


@overload
def as_integers(name: str, values: Count | ArrayLike | None) -> Count | None: ...


def as_integers(name: str, values: Any) -> int | Tensor | None:
    """Return an integer or None as it is, and all else as an array of int64, or raise `ValueError`.

    What is beyond 63 bits becomes the largest integer that is not: both are beyond every token.
    """
    if values is None or (isinstance(values, Integral) and not isinstance(values, bool)):
        return values if values is None else int(values)
    values = _integer_array(name, values)
    return torch.where(_beyond(values), _LARGEST, values.to(torch.int64))


def as_ids(query: Any, key: Any) -> tuple[Tensor, Tensor]:
    """Return the ids of queries and keys as arrays of int64, in which the same pairs are equal.

    Example:
        >>> query = torch.tensor([255, 7], dtype=torch.uint8)
        >>> as_ids(query, torch.tensor([-1, 7], dtype=torch.int8))
        (tensor([255,   7]), tensor([-1,  7]))
    """
    query = _integer_array("query segments", query)
    key = query if key is None else _integer_array("key segments", key)
    unsigned = [ids.dtype == torch.uint64 for ids in (query, key)]
    signed = [ids.to(torch.int64) for ids in (query, key)]
    if any(unsigned) and not all(unsigned):
        # A half of the unsigned numbers is read as negative ones, which then stand for them alone.
        signed = [
            torch.where(ids < 0, -_LARGEST - 1, ids) if large else ids.clamp(min=-_LARGEST)
            for ids, large in zip(signed, unsigned, strict=True)
        ]
    return signed[0], signed[1]


def _beyond(values: Tensor) -> Tensor:
    # Of unsigned numbers those that a signed type reads as negative.
    return (values.to(torch.int64) < 0) & (values.dtype == torch.uint64)


def _integer_array(name: str, values: Any) -> Tensor:
    array = as_array(name, values)
    if array.is_floating_point() or array.is_complex() or array.dtype == torch.bool:
        raise ValueError(
            f"{name} must be integers; got dtype {array.dtype}. Cast them before the call"
        )
    return array


def as_array(name: str, values: Any) -> Tensor:
    """Return an array as it is, and numbers and lists as one, or raise."""
    if not isinstance(values, Tensor | np.ndarray | np.generic | bool | int | float | list | tuple):
        raise ValueError(
            f"{name} must be an array, a number or a list; got {type(values).__name__}. "
            "Pass an array of PyTorch or NumPy"
        )
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} must be one array; got {error}. Pass rows of one length, of numbers"
        ) from error
