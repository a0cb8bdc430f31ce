"""Integers of any dtype in one that holds all values that are looked at."""

import torch
from jaxtyping import Int64
from torch import Tensor

from torch_ref.functional.shapes import ArrayLike


def clipped(
    values: ArrayLike | int, limit: int, device: torch.device | str | None = None
) -> Int64[Tensor, "*shape"]:
    """Return integers between -1 and `limit` as they are, and others as the nearer of these two.

    Ids are compared with sizes and with each other, and lengths with positions: in a dtype of 8
    bits the larger would wrap around, and torch indexes by int32 and int64 alone.

    Example:
        >>> clipped(torch.tensor([7, 255], dtype=torch.uint8), 300).tolist()
        [7, 255]
        >>> clipped(torch.tensor([-100, 2**32 + 7]), 300).tolist()
        [-1, 300]
    """
    return torch.as_tensor(values, device=device).long().clamp(-1, limit)
