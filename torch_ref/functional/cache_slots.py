"""The slots of a cache, and the writing of new tokens into them."""

import torch
from jaxtyping import Float, Integer
from torch import Tensor


def token_slots(
    positions: Integer[Tensor, "b t"], count: Integer[Tensor, " b"], capacity: int, *, ring: bool
) -> Integer[Tensor, "b t"]:
    """Return the slot of each new token; a token in slot `capacity` is not stored.

    Example:
        >>> token_slots(torch.tensor([[7, 8, 9]]), torch.tensor([3]), 2, ring=True)
        tensor([[2, 0, 1]])
    """
    i = torch.arange(positions.shape[1], device=positions.device)
    count = count[:, None]
    stored = i < count
    if not ring:
        # The slot behind the last one: what is written there is dropped.
        return torch.where(stored, positions, capacity)
    # Of tokens that share a slot, the last one is stored: the order of writes is not defined.
    stored = stored & (i >= count - capacity)
    return torch.where(stored, positions % capacity, capacity)


def write_tokens(
    cached: Float[Tensor, "b k s h"], new: Float[Tensor, "b t k h"], slots: Integer[Tensor, "b t"]
) -> Float[Tensor, "b k s h"]:
    """Return an array of a cache with new tokens in it.

    Args:
        cached: `(b, k, s, h)`.
        new: `(b, t, k, h)`.
        slots: slot of each new token, `(b, t)`; a token in slot s is not stored.

    Example:
        >>> new = torch.tensor([7.0, 8.0]).reshape(1, 2, 1, 1)
        >>> write_tokens(torch.zeros((1, 1, 3, 1)), new, torch.tensor([[1, 3]]))[0, 0, :, 0]
        tensor([0., 7., 0.])
    """
    # The last slot is for what is not stored.
    written = torch.cat([cached, torch.zeros_like(cached[:, :, :1])], dim=2)
    # Indices on either side of a slice: the axes of tokens come first, as in `new`.
    rows = torch.arange(len(new))[:, None]
    written[rows, :, slots] = new.to(cached.dtype)
    return written[:, :, :-1]
