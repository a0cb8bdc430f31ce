"""The dtype that sums, means and softmaxes are taken in, and what dtypes are called and hold."""

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for narrower dtypes, and the dtype itself for float32 and float64.

    Example:
        >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.float32 if dtype.itemsize < 4 else dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, the same in both packages.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def is_integer(dtype: torch.dtype) -> bool:
    """Return whether a dtype is one of integers, signed or not.

    Example:
        >>> is_integer(torch.uint8), is_integer(torch.bool)
        (True, False)
    """
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
