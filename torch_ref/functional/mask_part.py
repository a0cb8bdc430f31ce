"""What a condition of a mask has to answer, and the answers that follow from others."""

from __future__ import annotations

from typing import Any

from jaxtyping import Integer
from torch import Tensor

from attn_spec.mask_checks import check_rows
from torch_ref.functional.shapes import Index

Count = int | Integer[Tensor, ""] | Integer[Tensor, " b"]


class MaskPart:
    """One condition on (query, key)."""

    def resolve(self, b: int, n: int, t: int, s: int) -> MaskPart:
        """Return the part for a call of this size, with its defaults filled in, or raise."""
        return self

    def sized(self, b: int | None, n: int | None) -> MaskPart:
        """Return the part for `b` rows of the batch and `n` heads; None leaves a number open."""
        return self

    def allow(self, rows: Index, cols: Index) -> Tensor:
        """Return the mask at query indices `(1, 1, t, 1)` and key indices `(1, 1, 1, s)`."""
        raise NotImplementedError

    def check_whole(self, s: int) -> None:
        """Raise unless arrays inside are those of a sequence of `s` tokens."""


class IntervalPart(MaskPart):
    """A part in which what a query sees is an interval of keys.

    A kind of interval is a dataclass with one method, `interval`; all else is derived from it here.
    Its fields are None, integers, or arrays of one integer or one a row of the batch.
    """

    def interval(self, i: Any) -> tuple[Any, Any]:
        """Return the first and the last key that query `i` sees.

        They are integers, or arrays that broadcast to `(b, 1, t, 1)`, and may lie outside the keys.
        """
        raise NotImplementedError

    def resolve(self, b, n, t, s):
        for name, value in vars(self).items():
            check_rows(name, value, b)
        return self

    def allow(self, rows, cols):
        first, last = self.interval(rows)
        return (cols >= first) & (cols <= last)
