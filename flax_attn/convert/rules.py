"""The engine of conversion: invertible rules, planned in full before anything is moved."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from einops import EinopsError, rearrange

Shape = tuple[int, ...]
Arrays = Mapping[str, np.ndarray]


class ConversionError(ValueError):
    """Weights that do not fit: the message names every missing, unexpected and mis-shaped entry."""


@dataclass(frozen=True)
class Rule:
    """One entry of a layout and the parameters it is made of; read forwards it exports, backwards it imports.

    Args:
        ours: names of parameters under one prefix; `("*",)` is any one parameter.
        theirs: name of the entry under the same prefix; `"*"` keeps the name.
        pattern: einops pattern from a parameter to its part of the entry; `""` leaves it as it is.
        axis: the parts are joined along this axis of the entry.
    """

    ours: tuple[str, ...]
    theirs: str
    pattern: str = ""
    axis: int = 0


@dataclass(frozen=True)
class Layout:
    """A named way to store the weights of a module.

    Args:
        rules: tried in order; a parameter belongs to the first rule that all of its parts are there for.
        ignored: regular expression for names that a state dict may hold beside weights, such as a mask buffer.
        refuse: says why a module cannot be stored this way, from its attributes, or returns None.
    """

    rules: tuple[Rule, ...]
    ignored: str = ""
    refuse: Callable[[object], str | None] = lambda module: None


@dataclass(frozen=True)
class Entry:
    """One rule applied to one module: where its parts are, and what shapes they have."""

    rule: Rule
    ours: tuple[str, ...]
    theirs: str
    shapes: tuple[Shape, ...]
    axes: Mapping[str, int]

    def join(self, arrays: Arrays) -> np.ndarray:
        """Return the entry made from our parameters."""
        parts = [self._arrange(arrays[name], self.rule.pattern) for name in self.ours]
        return np.ascontiguousarray(np.concatenate(parts, self.rule.axis) if len(parts) > 1 else parts[0])

    def split(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return our parameters made from the entry."""
        ends = np.cumsum([shape[self.rule.axis] for shape in self.their_shapes])[:-1] if len(self.ours) > 1 else []
        parts = np.split(array, ends, self.rule.axis)
        back = " -> ".join(reversed(self.rule.pattern.split(" -> ")))
        return {name: self._arrange(part, back) for name, part in zip(self.ours, parts, strict=True)}

    @property
    def their_shapes(self) -> list[Shape]:
        """The shape of each part within the entry."""
        return [self._arrange(np.empty(shape, bool), self.rule.pattern).shape for shape in self.shapes]

    @property
    def shape(self) -> Shape:
        """The shape of the entry."""
        shapes, axis = self.their_shapes, self.rule.axis
        if len(shapes) == 1:
            return shapes[0]
        return (*shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :])

    def fits_together(self) -> bool:
        """Whether the parts agree on all axes but the one they are joined along."""
        rests = {shape[: self.rule.axis] + shape[self.rule.axis + 1 :] for shape in self.their_shapes}
        return len(self.ours) == 1 or len(rests) == 1

    def _arrange(self, array, pattern):
        if not pattern:
            return array
        try:
            return rearrange(array, pattern, **{axis: n for axis, n in self.axes.items() if axis in pattern})
        except EinopsError as error:
            raise ConversionError(
                f"{', '.join(self.ours)} of shape {array.shape} does not read as {pattern.split(' -> ')[0]!r}. "
                "Of stacked layers convert one at a time; for other modules write a Layout"
            ) from error


def plan(shapes: Mapping[str, Shape], layout: Layout, axes: Callable[[str], Mapping[str, int]]) -> list[Entry]:
    """Return one entry for each name of the layout, every parameter belonging to exactly one.

    Args:
        shapes: of our parameters, by name.
        layout: to store them in.
        axes: the sizes of einops axes, such as `h`, at a prefix.

    Raises:
        ConversionError: if the layout has no place for a parameter.
    """
    entries, free = [], dict(shapes)
    for rule in layout.rules:
        for name in list(free):
            entry = _apply(rule, name, free, axes)
            if entry is not None and entry.fits_together():
                entries.append(entry)
                free = {name: shape for name, shape in free.items() if name not in entry.ours}
    if free:
        raise ConversionError(f"this layout has no place for {', '.join(f'{n} {s}' for n, s in free.items())}")
    return entries


def _apply(rule: Rule, name: str, free: Mapping[str, Shape], axes) -> Entry | None:
    if rule.ours == ("*",):
        return Entry(rule, (name,), name, (free[name],), {}) if name in free else None
    if name != rule.ours[0] and not name.endswith("." + rule.ours[0]):
        return None
    prefix = name[: len(name) - len(rule.ours[0])]
    ours = tuple(prefix + part for part in rule.ours)
    if not all(part in free for part in ours):
        return None
    return Entry(rule, ours, prefix + rule.theirs, tuple(free[part] for part in ours), axes(prefix))


def problems(entries: list[Entry], theirs: Mapping[str, Shape], layout: Layout) -> list[str]:
    """Return a line for every entry that is missing, mis-shaped or unexpected."""
    wanted = {entry.theirs: entry.shape for entry in entries}
    extra = [name for name in theirs if name not in wanted and not re.fullmatch(layout.ignored, name)]
    missing = [name for name in wanted if name not in theirs]
    if missing == list(wanted) and (prefix := _common_prefix(wanted, theirs)):
        return [f"every name has the prefix {prefix!r}: pass prefix={prefix!r}"]
    lines = [f"missing {name} {wanted[name]}{_nearest(name, extra)}" for name in missing]
    for name, shape in wanted.items():
        if name in theirs and tuple(theirs[name]) != shape:
            lines.append(f"mis-shaped {name}: expected {shape}, got {tuple(theirs[name])}")
    return lines + [f"unexpected {name} {tuple(theirs[name])}{_nearest(name, missing)}" for name in extra]


def _common_prefix(wanted: Mapping[str, Shape], theirs: Mapping[str, Shape]) -> str:
    first = next(iter(wanted), "")
    prefixes = [name.removesuffix(first) for name in theirs if first and name.endswith("." + first)]
    return next((prefix for prefix in prefixes if all(prefix + name in theirs for name in wanted)), "")


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f" (nearest: {near[0]})" if near else ""
