"""New tokens, written into the slots of a cache."""

import torch
from jaxtyping import Float, Integer
from torch import Tensor


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
    rows = torch.arange(len(new))[:, None]
    written[rows, :, slots] = new.to(cached.dtype)
    return written[:, :, :-1]
