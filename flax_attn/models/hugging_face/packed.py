"""Entries of files that store a matrix in 8 or 4 bits."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flax_attn.convert.headers import Stored
from flax_attn.convert.rules import Shape


@dataclass(frozen=True)
class Codes:
    """Numbers of 8 or 4 bits, and the scales of their blocks, read with the axes of the entry.

    Args:
        weight: function that reads the numbers.
        scale: function that reads the scales.
        block: outputs and inputs of a block.
        per_element: how many numbers lie in an element of `weight`, along the inputs.
    """

    weight: Callable[[], np.ndarray]
    scale: Callable[[], np.ndarray]
    block: tuple[int, int]
    per_element: int = 1

    def shape(self, what: str, shape: Shape) -> Shape:
        """Return the shape of the numbers or the scales of a parameter `(..., d_in, d_out)`."""
        *lead, d_in, d_out = shape
        if what == "weight":
            return *lead, d_in // self.per_element, d_out
        outputs, inputs = self.block
        return *lead, -(-d_in // inputs), -(-d_out // outputs)


@dataclass(frozen=True)
class Packed(Stored):
    """An entry that `read` makes floats of, stored as `codes`."""

    codes: Codes
