"""Masks as data: which query may see which key, kept as structure and not as a matrix.

A `Mask` is a conjunction of parts, so any block of a mask can be made without the whole. `True`
means attend, everywhere. Query `i` has position `offset + i`, key `j` has position `j`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Integer
from torch import Tensor

from attn_spec.checks import check_positive
from attn_spec.function_checks import SEES, check_function
from attn_spec.mask_checks import check_counts, check_window, refuse_operator, refuse_truth
from attn_spec.mask_text import check_printable, expression, picture
from torch_ref.functional.mask_arguments import as_booleans, as_ids, as_integers
from torch_ref.functional.mask_function import Where
from torch_ref.functional.mask_part import Count, MaskPart
from torch_ref.functional.mask_parts import Causal, Dense, Lengths, Prefix, Segments, Window
from torch_ref.functional.shapes import ArrayLike, Visible


@dataclass(frozen=True)
class Mask:
    """A conjunction of parts: `mask & other` lets through what both let through.

    The structure is kept. An empty `Mask()` hides nothing.

    Example:
        >>> mask = Mask.causal() & Mask.lengths(key=torch.tensor([3, 2]))
        >>> mask.materialise(2, 1, 3, 3)[1, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [1, 1, 0]], dtype=torch.int32)
    """

    parts: tuple[MaskPart, ...] = ()

    @staticmethod
    def causal(offset: Count | ArrayLike | None = None) -> Mask:
        """Query `i` sees key `j` when `j <= offset + i`.

        The offset is 0 where t == s and must be given elsewhere.
        """
        return Mask((Causal(offset=as_integers("offset", offset)),))

    @staticmethod
    def window(
        left: int | None, right: int | None, offset: Count | ArrayLike | None = None
    ) -> Mask:
        """Query at position `p` sees the keys from `p - left` to `p + right`, both included."""
        check_window(left=left, right=right)
        # Integers of NumPy become those of Python.
        left = None if left is None else int(left)
        right = None if right is None else int(right)
        return Mask((Window(left, right, offset=as_integers("offset", offset)),))

    @staticmethod
    def sliding_window(width: int, offset: Count | ArrayLike | None = None) -> Mask:
        """Causal, and `width` keys in all, the query's own included: `window(width - 1, 0)`."""
        check_positive(width=width)
        return Mask.window(width - 1, 0, offset)

    @staticmethod
    def where(function: Callable, offset: Count | ArrayLike | None = None) -> Mask:
        """Key `j` is seen from position `p = offset + i` when `function(b, n, p, j)`.

        The function is written for scalars: `b` is the row of the batch, `n` the query head. It is
        called once, on tensors of indices: it indexes arrays and computes with `&`, `|` and `~`,
        without `if`. The offset is 0 if not given, and follows a `KVCache`.

        Example:
            >>> strided = Mask.where(lambda b, n, i, j: (i - j) % 2 == 0) & Mask.causal()
            >>> print(strided.as_text(3))
              0 1 2
            0 ■ · ·
            1 · ■ ·
            2 ■ · ■
        """
        check_function("mask", function, SEES)
        return Mask((Where(function, offset=as_integers("offset", offset)),))

    @staticmethod
    def lengths(
        *, query: Count | ArrayLike | None = None, key: Count | ArrayLike | None = None
    ) -> Mask:
        """Hide padding: in row `b` the first `query[b]` queries and `key[b]` keys are real.

        With `key` only, queries of padding still attend, and their output is not 0. In
        self-attention of a layer pass `lengths=` to the layer, which hides both.
        """
        counts = as_integers("query lengths", query), as_integers("key lengths", key)
        check_counts(query_lengths=query, key_lengths=key)
        return Mask((Lengths(*counts),))

    @staticmethod
    def segments(query: ArrayLike, key: ArrayLike | None = None) -> Mask:
        """Packed documents: a query sees the keys that have its id.

        The ids are `(b, t)` for queries and `(b, s)` for keys, which have those of the queries if
        `key` is None.
        """
        return Mask((Segments(*as_ids(query, key)),))

    @staticmethod
    def prefix(length: Count | ArrayLike, offset: Count | ArrayLike | None = None) -> Mask:
        """Prefix-LM: causal, and the first `length` keys are open to every query."""
        count = as_integers("prefix length", length)
        check_counts(prefix_length=length)
        return Mask((Prefix(count, offset=as_integers("offset", offset)),))

    @staticmethod
    def dense(array: ArrayLike) -> Mask:
        """Any boolean array that broadcasts to `(b, n, t, s)`, True = attend.

        One of numbers is taken where its values are known and are 0 and 1, with at least one 1.
        """
        return Mask((Dense(as_booleans(array)),))

    # NumPy leaves `array & mask` to the mask.
    __array_priority__ = 1

    def __and__(self, other: Mask | ArrayLike) -> Mask:
        return Mask(self.parts + as_mask(other).parts)

    __rand__ = __and__

    def __or__(self, other: object) -> None:
        refuse_operator("|")

    __ror__ = __or__

    def __invert__(self) -> None:
        refuse_operator("~")

    def __bool__(self) -> bool:
        refuse_truth()

    def resolve(self, b: int, n: int, t: int, s: int) -> Mask:
        """Return the mask for a call of this size: default offsets filled in, shapes checked."""
        return Mask(tuple(part.resolve(b, n, t, s) for part in self.parts))

    def sized(self, b: int | None, n: int | None) -> Mask:
        """Return the mask for `b` rows and `n` heads; None leaves a number open.

        Functions inside the mask may read both. A call does this for its own mask.
        """
        return Mask(tuple(part.sized(b, n) for part in self.parts))

    def block(self, rows: Integer[Tensor, " t"], cols: Integer[Tensor, " s"]) -> Visible:
        """Return the mask at the query indices `rows` and key indices `cols`.

        Axes that do not matter have size 1.
        """
        rows = rows[None, None, :, None]
        cols = cols[None, None, None, :]
        # Axes of 1 until a part needs more: a causal mask has no row of the batch.
        allowed = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=rows.device)
        for part in self.parts:
            allowed = allowed & part.allow(rows, cols)
        return allowed

    def materialise(self, b: int, n: int, t: int, s: int, device=None) -> Bool[Tensor, "b n t s"]:
        """Return the whole mask as one boolean array."""
        block = self.resolve(b, n, t, s).block(
            torch.arange(t, device=device), torch.arange(s, device=device)
        )
        return block.expand(b, n, t, s)

    def as_text(self, t: int, s: int | None = None, *, b: int = 1, n: int = 1) -> str:
        """Return the mask in marks, queries down and keys across: `■` is seen, `·` is hidden.

        Where s is not given it is t. Rows of a batch and heads that differ get a picture each.

        Example:
            >>> print(Mask.sliding_window(2).as_text(4))
              0 1 2 3
            0 ■ · · ·
            1 ■ ■ · ·
            2 · ■ ■ ·
            3 · · ■ ■
        """
        s = t if s is None else s
        check_printable(t, s)
        block = self.resolve(b, n, t, s).block(
            torch.arange(t, device="cpu"), torch.arange(s, device="cpu")
        )
        return picture(block.expand(-1, -1, t, s).tolist())

    def __repr__(self) -> str:
        return expression(self.parts)

    def at(self, rows: Integer[Tensor, "#b t"], cols: Integer[Tensor, "#b s"]) -> Visible:
        """Return the mask at query and key indices that may differ between rows of the batch.

        Example:
            >>> rows, cols = torch.tensor([[4], [5]]), torch.tensor([[3, 4, 5], [3, 4, 5]])
            >>> Mask.causal().at(rows, cols).int()[:, 0, 0]
            tensor([[1, 1, 0],
                    [1, 1, 1]], dtype=torch.int32)
        """
        mask = self.sized(len(rows), None)
        shape = (len(rows), -1, rows.shape[1], cols.shape[1])
        blocks = [mask.block(*indices) for indices in zip(rows, cols, strict=True)]
        # A mask that is the same for all rows of the batch is one row.
        full = [block.expand(shape) for block in blocks]
        return torch.stack([block[i] for i, block in enumerate(full)])

    def check_whole(self, s: int) -> None:
        """Raise unless the arrays inside are those of a sequence of `s` tokens."""
        for part in self.parts:
            part.check_whole(s)


def as_mask(mask: Mask | ArrayLike | None, heads: bool = True) -> Mask:
    """Return a `Mask` for whatever may be passed as one; None hides nothing.

    Without `heads` an array of rank 3 is `(b, t, s)`, and the head axis is put in.
    """
    if mask is None:
        return Mask()
    mask = mask if isinstance(mask, Mask) else Mask.dense(mask)
    return mask if heads else Mask(tuple(_with_head_axis(part) for part in mask.parts))


def _with_head_axis(part: MaskPart) -> MaskPart:
    if isinstance(part, Dense) and part.array.ndim == 3:
        return Dense(part.array[:, None])
    return part
