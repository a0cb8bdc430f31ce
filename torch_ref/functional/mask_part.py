"""What a condition of a mask has to answer."""

from __future__ import annotations

from jaxtyping import Integer
from torch import Tensor

from torch_ref.functional.shapes import Index

Count = int | Integer[Tensor, ""] | Integer[Tensor, " b"]


class Part:
    """One condition on (query, key)."""

    def resolve(self, b: int, n: int, t: int, s: int) -> Part:
        """Return the part for a call of this size, with its defaults filled in, or raise."""
        return self

    def sized(self, b: int | None, n: int | None) -> Part:
        """Return the part for `b` rows of the batch and `n` heads; None leaves a number open."""
        return self

    def allow(self, rows: Index, cols: Index) -> Tensor:
        """Return the mask at query indices `(1, 1, t, 1)` and key indices `(1, 1, 1, s)`."""
        raise NotImplementedError

    def check_whole(self, s: int) -> None:
        """Raise unless arrays inside are those of a sequence of `s` tokens."""
