"""The bounds of numbers in a `config.json`, by kind.

A larger number is a mistake, or the model would not fit into memory.
"""

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
# Layers and experts: each is a part of its own.
COUNTS = Bounds(0, 10_000)
# Texts, whose positions are int32.
LENGTHS = Bounds(1, 2**31 - 1)
# The number of one token in a vocabulary.
TOKENS = Bounds(0, 2**31 - 1)
# Pixels along a side of an image.
IMAGES = Bounds(1, 2**16)
PATCHES = Bounds(1, 2**10)
EPSILONS = Bounds(0, 1)
# Probabilities of dropout, below 1.
RATES = Bounds(0, math.nextafter(1, 0))
# Bases of rotary positions, above 1 so that frequencies fall.
BASES = Bounds(math.nextafter(1, 2), 1e15)
# Factors on lengths, frequencies and scores, and the caps of these.
FACTORS = Bounds(0, 1e6)
PARTS = Bounds(0, 1)
