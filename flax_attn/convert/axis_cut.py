"""One axis of an array, cut into parts or joined from them."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

A = TypeVar("A")


class AxisCut(NamedTuple):
    """How an axis consists of parts: one after the other, in each of several groups.

    The arrays are those of NumPy or JAX, and traced ones.

    Args:
        axis: the axis.
        widths: width of each part.
        groups: number of groups, such as heads, each of which has its share of every part.

    Example:
        >>> import numpy as np
        >>> [part.tolist() for part in AxisCut(0, (2, 4), groups=2).cut(np.arange(6))]
        [[0, 3], [1, 2, 4, 5]]
    """

    axis: int
    widths: tuple[int, ...]
    groups: int = 1

    def shape(self, whole: tuple[int, ...], part: int) -> tuple[int, ...]:
        """Return the shape of a part, from that of the whole."""
        return (*whole[: self.axis], self.widths[part], *whole[self.axis + 1 :])

    def cut(self, array: Any) -> list[Any]:
        """Return the parts."""
        if self.groups == 1:
            return [array[part] for part in self._slices()]
        in_groups = self._in_groups(array)
        shares = tuple(width // self.groups for width in self.widths)
        within = AxisCut(self.axis + 1, shares)
        return [self._without_groups(part) for part in within.cut(in_groups)]

    def join(self, parts: Sequence[A]) -> A:
        """Return the whole: the inverse of `cut`."""
        library = namespace(parts[0])
        if self.groups == 1:
            return library.concat(parts, axis=self.axis)
        joined = library.concat(list(map(self._in_groups, parts)), axis=self.axis + 1)
        return self._without_groups(joined)

    def _slices(self) -> Iterator[tuple[slice, ...]]:
        before = [slice(None)] * self.axis
        for end, width in zip(accumulate(self.widths), self.widths, strict=True):
            yield (*before, slice(end - width, end))

    def _in_groups(self, array: Any) -> Any:
        shape = array.shape
        return array.reshape(*shape[: self.axis], self.groups, -1, *shape[self.axis + 1 :])

    def _without_groups(self, array: Any) -> Any:
        shape = array.shape
        return array.reshape(*shape[: self.axis], -1, *shape[self.axis + 2 :])


def namespace(array: Any) -> ModuleType:
    """Return the functions for an array: `numpy`, or `jax.numpy`."""
    return array.__array_namespace__()
