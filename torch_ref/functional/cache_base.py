"""The base class of caches: how many tokens each row has, and the positions of new ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Integer
from torch import Tensor

from attn_spec.cache_checks import Shapes, check_cache_dtype, check_cache_shapes
from torch_ref.functional.mask_part import Count
from torch_ref.functional.shapes import ArrayLike

C = TypeVar("C", bound="Cache")


class Cache:
    """Base class of caches: what a layer keeps of the tokens so far.

    Each row of the batch has its own number of tokens.

    A kind of cache is a frozen dataclass. Its fields are tensors, but for those that `static` names
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
    def arrays(self) -> Mapping[str, Any]:
        """What is stored, by the names of the fields: all but the length and what is static."""
        names = [field.name for field in dataclasses.fields(self)]  # pyright: ignore[reportArgumentType]
        return {name: getattr(self, name) for name in names if name not in ("length", *self.static)}

    def replace(self: C, **changes: Any) -> C:
        """Return the cache with other values of some fields."""
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]

    def check_shapes(self, wanted: Shapes) -> None:
        """Raise unless the arrays are floating point and have these shapes, by field name."""
        for array in self.arrays.values():
            check_cache_dtype(str(array.dtype).removeprefix("torch."))
        check_cache_shapes(
            {name: tuple(array.shape) for name, array in self.arrays.items()}, wanted
        )

    @property
    def row_lengths(self) -> Integer[Tensor, "*b"]:
        """The length of each row."""
        device = next(iter(self.arrays.values())).device
        return torch.as_tensor(self.length, device=device).expand(self.batch)

    @property
    def invalid(self) -> Bool[Tensor, "*b"]:
        """The rows that were given tokens that do not fit, or impossible lengths."""
        return self.row_lengths < 0

    def positions(self, t: int, lengths: ArrayLike | int | None = None) -> Integer[Tensor, "*b t"]:
        """Return the positions of the next `t` tokens in their sequences; 0 for padding.

        The first `lengths` tokens of a row are real, and the rest is padding.
        """
        cached = self.row_lengths
        new = torch.arange(t, device=cached.device).expand(*cached.shape, t)
        if lengths is None:
            return cached[..., None] + new
        # Positions of padding could lie beyond a table of positions that is large enough for the
        # tokens.
        real = new < torch.as_tensor(lengths, device=cached.device).expand(cached.shape)[..., None]
        return torch.where(real, cached[..., None] + new, 0)
