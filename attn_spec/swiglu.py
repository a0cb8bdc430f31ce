"""The clamped SwiGLU as settings: what configs store, and both packages compute by."""

from dataclasses import dataclass

from attn_spec.portable import Portable


@dataclass(frozen=True, eq=False)
class SwiGLUBounds(Portable):
    """The settings of a `ClampedSwiGLU`, which is in both packages and has the formula.

    Args:
        limit: bound of both branches; the gate has no lower bound.
        alpha: slope of the sigmoid.

    Raises:
        ValueError: if the limit is not positive.

    Example:
        >>> SwiGLUBounds().limit
        7.0
    """

    limit: float = 7.0
    alpha: float = 1.702

    def __post_init__(self):
        if not self.limit > 0:
            raise ValueError(
                f"limit bounds the branches of a SwiGLU and must be positive; got {self.limit!r}"
            )
