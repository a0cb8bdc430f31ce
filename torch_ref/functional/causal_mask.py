"""The causal mask as an array."""

from jaxtyping import Bool
from torch import Tensor

from torch_ref.functional.masks import Mask


def create_causal_mask(
    t: int, s: int | None = None, offset: int | None = None
) -> Bool[Tensor, "t s"]:
    """Return the causal mask as an array, `True` = attend: `mask[i, j] = (j <= offset + i)`.

    Example:
        >>> create_causal_mask(3).int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [1, 1, 1]], dtype=torch.int32)
    """
    s = t if s is None else s
    return Mask.causal(offset).materialise(1, 1, t, s)[0, 0]
