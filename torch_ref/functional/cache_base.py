"""The base class of caches: how many tokens each row has, and the positions of new ones."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Bool, Integer
from torch import Tensor

from attn_spec.cache_checks import (
    Shapes,
    check_cache_dtype,
    check_cache_shapes,
    check_fits,
    check_lengths,
    check_rows,
    check_rows_of_lengths,
)
from attn_spec.checks import refuse_dtype
from torch_ref.functional.dtypes import dtype_name
from torch_ref.functional.mask_part import Count
from torch_ref.functional.shapes import ArrayLike, Positions, RowLengths

C = TypeVar("C", bound="Cache")


class Cache:
    """Base class of caches: what a layer keeps of the tokens so far.

    Each row of the batch has its own number of tokens.

    A kind of cache is a frozen dataclass. Its fields are tensors, except those that `static` names
    and for a length that is an integer.

    Attributes:
        length: how many tokens of each row were cached, `(b,)`; -1 in a row that is invalid. An
            integer is for all rows.
        static: names of the fields that are no tensors.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class LastToken(Cache):
        ...     token: Any
        ...     length: Any
        ...     @property
        ...     def batch(self):
        ...         return tuple(self.token.shape[:-1])
        >>> LastToken(torch.zeros((2, 4)), torch.tensor([3, 5])).positions(2).tolist()
        [[3, 4], [5, 6]]
    """

    length: Count
    static: ClassVar[tuple[str, ...]] = ()

    @property
    def batch(self) -> tuple[int, ...]:
        """The shape of the batch: `(b,)`, or `()` of one sequence."""
        raise NotImplementedError

    @property
    def limit(self) -> int | None:
        """How many tokens a sequence may have; None is any number."""
        return None

    @property
    def arrays(self) -> Mapping[str, Any]:
        """What is stored, by the names of the fields: all but the length and what is static."""
        others = ("length", *self.static)
        # Subclasses are dataclasses, which the type of the base does not say.
        fields = dataclasses.fields(cast(Any, self))
        names = [field.name for field in fields if field.name not in others]
        return {name: getattr(self, name) for name in names}

    def replace(self: C, **changes: Any) -> C:
        """Return the cache with other values of some fields."""
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]

    def check_shapes(self, wanted: Shapes) -> None:
        """Raise unless the arrays are floating point and have these shapes, by field name."""
        for array in self.arrays.values():
            check_cache_dtype(dtype_name(array.dtype))
        shapes = {name: tuple(array.shape) for name, array in self.arrays.items()}
        check_cache_shapes(shapes, wanted)

    def each_row(self, number: ArrayLike | int) -> Integer[Tensor, "*b"]:
        """Return a number for each row of the batch, given one for all or one for each."""
        device = next(iter(self.arrays.values())).device
        return torch.as_tensor(number, device=device).expand(self.batch)

    def indices(self, size: int) -> Integer[Tensor, "*b size"]:
        """Return `0 ... size - 1` for each row of the batch."""
        device = next(iter(self.arrays.values())).device
        return torch.arange(size, device=device).expand(*self.batch, size)

    @property
    def row_lengths(self) -> Integer[Tensor, "*b"]:
        """The length of each row."""
        return self.each_row(self.length)

    @property
    def invalid(self) -> Bool[Tensor, "*b"]:
        """The rows that were given tokens that do not fit, or impossible lengths."""
        return self.row_lengths < 0

    def count(self, t: int, lengths: RowLengths = None) -> tuple[Count, Count]:
        """Return the length of each row after `t` new tokens, and how many of them are stored.

        The first `lengths` new tokens of a row are real.
        """
        new = t if lengths is None else lengths
        # Read from shapes alone, so that an error comes before any work.
        if isinstance(new, int):
            self._check_known(t, new)
            if isinstance(self.length, int):
                return self.length + new, new
        return self._count_rows(t, self._real_of(new))

    def _real_of(self, lengths: ArrayLike | int) -> Tensor:
        """Return how many new tokens of each row are real."""
        given = tuple(np.shape(lengths))
        rows = self.batch or (1,)
        check_rows_of_lengths(given, *rows)
        return self.each_row(lengths)

    def _count_rows(self, t: int, new: Tensor) -> tuple[Tensor, Tensor]:
        cached = self.row_lengths
        # A row that was invalid stays so.
        valid = (cached >= 0) & (new >= 0) & (new <= t)
        if self.limit is not None:
            valid = valid & (cached + new <= self.limit)
        length = torch.where(valid, cached + new, -1)
        return length, torch.where(valid, new, 0)

    def _check_known(self, t: int, new: int) -> None:
        """Raise if `new` of `t` tokens cannot be, or do not fit."""
        check_lengths(new, t)
        if self.limit is not None:
            # An array of lengths is not read: its rows hold 0 tokens or more.
            cached = self.length if isinstance(self.length, int) else 0
            check_fits(self.limit, cached, new)

    def positions(self, t: int, lengths: RowLengths = None) -> Positions:
        """Return the positions of the next `t` tokens in their sequences; 0 for padding.

        The first `lengths` tokens of a row are real, and the rest is padding.
        """
        new = self.indices(t)
        positions = self.row_lengths[..., None] + new
        if lengths is None:
            return positions
        # Positions of padding could lie beyond a table of positions that is large enough for the
        # tokens.
        real = new < self.each_row(lengths)[..., None]
        return torch.where(real, positions, 0)


def check_empty(b: int | None, dtype: torch.dtype) -> None:
    """Raise unless there is an empty cache of so many rows and of this dtype.

    Raises:
        ValueError: if `b` is no number of rows, or `dtype` no dtype of the framework that is
            floating point.

    Example:
        >>> check_empty(2, torch.bfloat16)
    """
    check_rows(b)
    if not isinstance(dtype, torch.dtype):
        refuse_dtype("dtype", dtype, "PyTorch", "torch", "torch.float32")
    check_cache_dtype(dtype_name(dtype))
