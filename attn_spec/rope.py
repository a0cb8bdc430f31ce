"""Rotary positions as settings: what configs store, and both packages rotate by."""

from dataclasses import dataclass

from attn_spec.checks import check_type
from attn_spec.frequencies import Scaling
from attn_spec.portable import Portable
from attn_spec.position_checks import check_base, check_pairs


@dataclass(frozen=True, eq=False)
class RotaryPositions(Portable):
    """The settings of a `RoPE`, which is in both packages and has the formula.

    Args:
        base: ratio of the frequencies, also called theta.
        width: number of features of a head that are rotated, its first ones; None is all.
        interleaved: whether pair `i` is features `(2i, 2i + 1)` or else `(i, i + width / 2)`.
        scaling: change of the frequencies for inputs longer than in training; None is no change.

    Raises:
        ValueError: if `base` is not above 1, `width` is odd, or `scaling` is not a `Scaling`.

    Example:
        >>> RotaryPositions(500.0, width=4)
        RotaryPositions(base=500.0, width=4, interleaved=False, scaling=None)
    """

    base: float = 10000.0
    width: int | None = None
    interleaved: bool = False
    scaling: Scaling | None = None

    def __post_init__(self):
        check_base(self.base)
        if self.width is not None:
            check_pairs("width", self.width)
        check_type(
            "scaling",
            self.scaling,
            Scaling | None,
            "scaling=LinearScaling(8.0), or another one, or None",
        )

    def check_head_dim(self, head_dim: int) -> None:
        """Raise unless heads of this width can be rotated."""
        if self.width is None:
            check_pairs("head_dim", head_dim)
        # The width was checked for pairs at construction.
        elif self.width > head_dim:
            raise ValueError(
                "width must not exceed head_dim, as it counts rotated features of a head; got"
                f" width={self.width}, head_dim={head_dim}. For all of them use width=None"
            )
        if self.scaling is not None:
            self.scaling.check_width(head_dim if self.width is None else self.width)
