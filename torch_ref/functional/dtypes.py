"""The dtype that sums, means and softmaxes are taken in, and the names of dtypes."""

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
