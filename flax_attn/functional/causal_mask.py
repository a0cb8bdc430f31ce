"""The causal mask as an array."""

from jaxtyping import Array, Bool

from flax_attn.functional.masks import Mask


def create_causal_mask(
    t: int, s: int | None = None, offset: int | None = None
) -> Bool[Array, "t s"]:
    """Return the causal mask as an array, `True` = attend: `mask[i, j] = (j <= offset + i)`.

    Raises:
        ValueError: if t != s and no offset is given.

    Example:
        >>> create_causal_mask(3).astype(int)
        Array([[1, 0, 0],
               [1, 1, 0],
               [1, 1, 1]], dtype=int32)
    """
    s = t if s is None else s
    return Mask.causal(offset).materialise(1, 1, t, s)[0, 0]
