"""The arguments of mask constructors, checked and in one integer type."""

from numbers import Integral
from typing import Any, overload

import torch
from torch import Tensor

from attn_spec.mask_checks import check_integers, check_zeros_and_ones, read_array
from torch_ref.functional.mask_part import Count
from torch_ref.functional.shapes import ArrayLike

_LARGEST = 2**63 - 1


def as_booleans(array: Any) -> Tensor:
    """Return a boolean array, also of one that is known to hold 0 and 1, or raise `ValueError`.

    Example:
        >>> as_booleans(torch.tensor([1.0, 0.0]))
        tensor([ True, False])
    """
    array = _array("mask", array)
    if array.dtype != torch.bool:
        check_zeros_and_ones(_is_zeros_and_ones(array), array.dtype, "bool()")
        array = array.bool()
    return array


def _is_zeros_and_ones(array: Tensor) -> bool | None:
    if array.is_complex():
        return False
    ones = array == 1
    try:
        return bool((ones | (array == 0)).all() and ones.any())
    # A tensor of the meta device, or under torch.func.vmap, has no values.
    except RuntimeError:
        return None


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
    is_mixed = (query.dtype == torch.uint64) != (key.dtype == torch.uint64)
    return _signed(query, is_mixed), _signed(key, is_mixed)


def _signed(ids: Tensor, is_mixed: bool) -> Tensor:
    """Return ids as signed integers; `is_mixed` if just one of queries and keys is unsigned."""
    signed = ids.to(torch.int64)
    if not is_mixed:
        return signed
    least = -_LARGEST - 1
    # A half of the unsigned numbers is read as negative ones, which then stand for them alone.
    is_unsigned = ids.dtype == torch.uint64
    return torch.where(signed < 0, least, signed) if is_unsigned else signed.clamp(min=least + 1)


def _beyond(values: Tensor) -> Tensor:
    # Of unsigned numbers those that a signed type reads as negative.
    return (values.to(torch.int64) < 0) & (values.dtype == torch.uint64)


def _integer_array(name: str, values: Any) -> Tensor:
    array = _array(name, values)
    is_number = array.is_floating_point() or array.is_complex() or array.dtype == torch.bool
    check_integers(name, not is_number, array.dtype)
    return array


def _array(name: str, values: Any) -> Tensor:
    return read_array(name, values, torch.as_tensor, Tensor, "PyTorch")
