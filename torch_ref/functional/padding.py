"""Rows of a batch: which of their tokens are real, and arrays of one row, or of none."""

import torch
from jaxtyping import Bool
from torch import Tensor

from torch_ref.functional.shapes import ArrayLike


def real_tokens(
    b: int, t: int, lengths: ArrayLike | int | None, device: torch.device | str | None = None
) -> Bool[Tensor, "b t"]:
    """Return which of `t` tokens of `b` rows are real: the first `lengths` of each, `(b,)`; None is all.

    Example:
        >>> real_tokens(2, 3, torch.tensor([2, 0])).tolist()
        [[True, True, False], [False, False, False]]
    """
    counts = torch.as_tensor(t if lengths is None else lengths, device=device).expand(b)
    return torch.arange(t, device=device) < counts[:, None]


def shape_of(x: Tensor | None) -> tuple[int, ...] | None:
    """Return the shape of an array, None where there is none.

    Example:
        >>> shape_of(None) is None
        True
    """
    return None if x is None else tuple(x.shape)


def batched(x: Tensor | None) -> Tensor | None:
    """Return an array as the one row of a batch, None where there is none.

    Example:
        >>> batched(None) is None
        True
    """
    return None if x is None else x[None]
