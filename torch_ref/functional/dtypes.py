"""The dtype that sums, means and softmaxes are taken in."""

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for narrower dtypes, and the dtype itself for float32 and float64.

    Example:
        >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.float32 if dtype.itemsize < 4 else dtype
