"""What a condition of a mask has to answer."""

from __future__ import annotations

from jaxtyping import Integer
from torch import Tensor

from torch_ref.functional.shapes import Index

Count = int | Integer[Tensor, ""] | Integer[Tensor, " b"]


class Part:
    """One condition on (query, key)."""

    def resolve(self, b: int, n: int, t: int, s: int) -> Part:
        """Return the part for a call of this size, its defaults filled in, or raise `ValueError`."""
        return self

    def sized(self, b: int | None, n: int | None) -> Part:
        """Return the part for so many rows of the batch and heads; None leaves open how many."""
        return self

    def allow(self, rows: Index, cols: Index) -> Tensor:
        """Return the block of the mask at query indices `(1, 1, t, 1)` and key indices `(1, 1, 1, s)`."""
        raise NotImplementedError

    def check_whole(self, s: int) -> None:
        """Raise unless arrays inside are those of a sequence of `s` tokens."""
