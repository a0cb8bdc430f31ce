"""The numbers of an array without their order, and arrays that hold the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import numpy as np

from flax_attn.parity.trace.layouts import laid_out

# Relative to the size of an array: far below any difference that matters, and above the rounding of
# a deep network in float64.
SAME = 1e-11
# A number this large hides a score, as infinity does; it is larger where all numbers are large:
# where this share of them is.
HIDING, SMALL = 1e8, 0.1
# Where all numbers are 0, no difference is allowed.
TINY = 1e-300
# A moment of n rounded numbers is that exact.
CLOSE = 1e-9
# The layouts of an array that are tried.
LAYOUTS = 24
# The sorted numbers that are kept: 256 MiB.
ROOM = 2**25


class Sorted:
    """Sorted numbers of arrays: those that were used last are kept, the others sorted again.

    Args:
        room: largest count of numbers that are kept; those of one array are kept whatever it is.
    """

    def __init__(self, room: int = ROOM):
        self.room = room
        self.size = 0
        self._kept: dict[Numbers, np.ndarray] = {}

    def of(self, numbers: Numbers) -> np.ndarray:
        """Return the numbers of an array that hide nothing, in order."""
        found = self._kept.pop(numbers, None)
        if found is None:
            found = np.sort(_shown(numbers.array))
            self.size += found.size
        # The last of the keys is the one that was used last.
        self._kept[numbers] = found
        self._make_room()
        return found

    def _make_room(self) -> None:
        while self.size > self.room and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            self.size -= self._kept.pop(oldest).size


def _shown(array: np.ndarray) -> np.ndarray:
    """Return the numbers of an array that hide nothing."""
    flat = flattened(array)
    sizes = np.abs(flat)
    # In most arrays no number hides one. NaN is not less than another number.
    if sizes.max(initial=0.0) < HIDING:
        return flat
    with np.errstate(invalid="ignore"):
        return flat[sizes < _hiding(flat)]


def _hiding(array: np.ndarray) -> float:
    """Return the size from which the numbers of an array hide what is in their place."""
    sizes = np.abs(array[np.isfinite(array)])
    if sizes.max(initial=0.0) < HIDING:
        return HIDING
    return HIDING * max(1.0, float(np.quantile(sizes, SMALL)))


@dataclass(eq=False)
class Numbers:
    """The numbers of an array without their order.

    Args:
        array: any array.
        kept: where its sorted numbers are kept.
    """

    array: np.ndarray
    kept: Sorted = field(default_factory=Sorted)

    @property
    def sorted(self) -> np.ndarray:
        """The numbers that hide nothing, in order."""
        return self.kept.of(self)

    @cached_property
    def scale(self) -> float:
        """The mean absolute value."""
        shown = _shown(self.array)
        # Divided first: the sum of numbers near the largest of their dtype is infinite.
        return float((np.abs(shown) / max(1, shown.size)).sum())

    @cached_property
    def features(self) -> np.ndarray:
        """Moments that do not change if all numbers are repeated equally often."""
        if not self.scale:
            return np.zeros(5)
        unit = self.sorted / self.scale
        moments = [unit.mean(), (unit**2).mean(), (unit**3).mean()]
        hidden = 1 - unit.size / self.array.size
        return np.array([self.scale, *moments, hidden])

    @cached_property
    def telling(self) -> bool:
        """Whether equal numbers are the same quantity: they are many, or at least not all alike."""
        x = self.sorted
        if self.array.dtype.kind not in "fc" or not x.size:
            return False
        return _of_many_digits(x[0]) if x.size == 1 else _differ(x, SAME * (self.scale or 1))

    def equals(self, other: Numbers) -> bool:
        """Whether both hold the same numbers, each perhaps repeated."""
        theirs = other.features
        if not _within(self.features, theirs, CLOSE * (1 + np.abs(theirs))):
            return False
        few, many = sorted((self.sorted, other.sorted), key=len)
        scale = max(self.scale, other.scale)
        return _repeats(many, few, SAME * scale)


def _repeats(many: np.ndarray, few: np.ndarray, limit: float) -> bool:
    """Whether sorted numbers are those of another array, each of them as often."""
    if not few.size or many.size % few.size:
        return not many.size
    # In order, the repetitions of a number follow it.
    times = many.size // few.size
    return _within(many[::times], few, limit)


def _differ(ordered: np.ndarray, least: float) -> bool:
    """Whether some numbers are at least five different ones, or all different."""
    apart = np.diff(ordered) > least
    distinct = 1 + int(np.count_nonzero(apart))
    return distinct > 4 or distinct == ordered.size


def _of_many_digits(number: np.floating) -> bool:
    """Whether a number is none of those that are equal by chance, such as 0.5."""
    return float(f"{number:.6g}") != float(number)


def _within(first: np.ndarray, second: np.ndarray, limit: float | np.ndarray) -> bool:
    apart = np.abs(first - second)
    return bool((apart <= limit).all())


def same_array(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays hold the same numbers at the same places, except for axes of size 1."""
    if one.size != other.size:
        return False
    first, second = np.squeeze(one), np.squeeze(other)
    return first.shape == second.shape and _same(first, second)


def _same(first: np.ndarray, second: np.ndarray) -> bool:
    if first.dtype.kind not in "fc":
        return bool((first == second).all())
    # In most arrays no number hides one.
    scale = _scale_of_all(first, second)
    if scale is None:
        return _close(first, second)
    return _within(first, second, SAME * scale)


def _scale_of_all(first: np.ndarray, second: np.ndarray) -> float | None:
    """Return the larger scale of two arrays in float64; None where a number may hide another."""
    if not first.size or not first.dtype == second.dtype == np.float64:
        return None
    sizes, others = np.abs(first), np.abs(second)
    # NaN is not less than another number.
    if sizes.max() < HIDING and others.max() < HIDING:
        return max(sizes.mean(), others.mean(), TINY)
    return None


def is_laid_out(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether an array is another in a layout; where one repeats numbers, no order is known."""
    if ours.size != theirs.size:
        return True
    layouts = islice(laid_out(theirs, ours.shape), LAYOUTS)
    return any(same_array(ours, value) for value in layouts)


def _close(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether arrays of one shape agree where neither hides a number, and hide the same."""
    hiding = min(_hiding(first), _hiding(second))
    hidden = _hidden(first, hiding)
    if (hidden != _hidden(second, hiding)).any():
        return False
    scale = max(Numbers(first).scale, Numbers(second).scale, TINY)
    return _within(first[~hidden], second[~hidden], SAME * scale)


def _hidden(array: np.ndarray, hiding: float) -> np.ndarray | np.bool:
    with np.errstate(invalid="ignore"):
        return (np.abs(array) >= hiding) | ~np.isfinite(array)


def flattened(array: np.ndarray) -> np.ndarray:
    """Return the numbers of an array, of complex ones the real and the imaginary parts."""
    if np.iscomplexobj(array):
        array = np.stack([np.real(array), np.imag(array)])
    return np.asarray(array, np.float64).reshape(-1)
