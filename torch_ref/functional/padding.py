"""Rows of a batch: which of their tokens are real, and arrays of one row, or of none."""

import numpy as np
import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from attn_spec.cache_checks import check_lengths, check_rows_of_lengths
from torch_ref.functional.integers import clipped
from torch_ref.functional.mask_arguments import as_integers
from torch_ref.functional.shapes import ArrayLike, RowLengths


def real_tokens(
    b: int, t: int, lengths: RowLengths, device: torch.device | str | None = None
) -> Bool[Tensor, "b t"]:
    """Return which of `t` tokens of `b` rows are real: the first `lengths` of each row.

    `lengths` is one number or `(b,)`; None is all.

    Example:
        >>> real_tokens(2, 3, torch.tensor([2, 0])).tolist()
        [[True, True, False], [False, False, False]]
    """
    count = clipped(t if lengths is None else lengths, t, device)
    counts = count.expand(b)
    return torch.arange(t, device=device) < counts[:, None]


def check_known_lengths(lengths: RowLengths, b: int, t: int) -> None:
    """Raise unless lengths are integers, one or `(b,)`, from 0 to `t` where their values are known.

    Known are those of Python and NumPy. Tensors are not read, so that no call waits for the
    device.

    Example:
        >>> check_known_lengths(torch.tensor([9, 2]), b=2, t=3)
        >>> check_known_lengths([9, 2], b=2, t=3)  # doctest: +NORMALIZE_WHITESPACE
        Traceback (most recent call last):
        ...
        ValueError: lengths counts the real tokens of a call of t=3 tokens; got lengths=9.
        Use 0 to 3
    """
    if lengths is None:
        return
    counts = lengths if isinstance(lengths, Tensor) else np.asarray(lengths)
    as_integers("lengths", counts)
    check_rows_of_lengths(tuple(counts.shape), b)
    # To read an array would wait for the device.
    if isinstance(counts, Tensor):
        return
    for length in counts.flat:
        check_lengths(int(length), t)


def without_padding(
    numbers: ArrayLike, shape: tuple[int, ...], lengths: RowLengths
) -> Shaped[Tensor, "*b t"]:
    """Return numbers of tokens, with 0 for tokens behind `lengths`: these have no effect.

    Example:
        >>> without_padding(torch.tensor([[7, 8, -100]]), (1, 3), torch.tensor([2])).tolist()
        [[7, 8, 0]]
    """
    numbers = torch.as_tensor(numbers)
    if lengths is None:
        return numbers
    real = _are_real(shape, lengths, numbers.device)
    # 0 is in every table of ids and of positions.
    return torch.where(real, numbers, 0)


def _are_real(shape: tuple[int, ...], lengths: RowLengths, device: torch.device) -> Tensor:
    b, t = (1, *shape)[-2:]
    check_known_lengths(lengths, b, t)
    return real_tokens(b, t, lengths, device).reshape(shape)


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
