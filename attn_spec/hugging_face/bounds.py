"""The bounds of numbers in a `config.json`, by kind.

A larger number is a mistake, or the model would not fit into memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Number = int | float


@dataclass(frozen=True)
class Bounds:
    """The smallest and the largest value that a number of some kind may have, both included.

    Args:
        least: the smallest value.
        most: the largest value.

    Example:
        >>> Bounds(0, 10).hold(11), str(Bounds(0, 10))
        (False, 'from 0 to 10')
    """

    least: Number
    most: Number

    def hold(self, value: Number) -> bool:
        """Whether a value is within; NaN is not."""
        return self.least <= value <= self.most

    def __str__(self) -> str:
        return f"from {self.least} to {self.most}"


# No weight has more elements than 2**63 - 1, whatever its axes are: two widths, and heads or
# experts, or a length.
WIDTHS = Bounds(1, 2**22)
HEADS = Bounds(1, 10_000)
COUNTS = Bounds(0, 10_000)  # of layers and experts: each is a part of its own
LENGTHS = Bounds(1, 2**31 - 1)  # of texts: positions are int32
TOKENS = Bounds(0, 2**31 - 1)  # the number of a token itself
IMAGES = Bounds(1, 2**16)  # pixels of a side
PATCHES = Bounds(1, 2**10)
EPSILONS = Bounds(0, 1)
RATES = Bounds(0, math.nextafter(1, 0))  # of dropout
BASES = Bounds(math.nextafter(1, 2), 1e15)  # of rotary positions
FACTORS = Bounds(0, 1e6)  # of lengths, frequencies and scores, and where these are capped
PARTS = Bounds(0, 1)
