"""The engine of conversion: invertible rules, and the entries that they make."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from einops import EinopsError, rearrange

Shape = tuple[int, ...]
Arrays = Mapping[str, np.ndarray]
# The sizes of einops axes that a shape alone does not give, at a prefix.
Axes = Callable[[str], Mapping[str, int]]


class ConversionError(ValueError):
    """Weights that do not fit: the message names every missing, unexpected and mis-shaped entry."""


@dataclass(frozen=True)
class Rule:
    """One entry of a layout and the parameters it is made of, to export and to import.

    A name matches under any prefix, and `{a}` matches any one part of a dotted name; both are
    carried over. `Rule(("{name}",), "{name}")` keeps every name, `Rule(("blocks.{i}.norm.scale",),
    "layer.{i}.ln.weight")` renames in every block. If `*` takes the place of a number in
    their name, the entry is stored in pieces, one for each index of its first axis:
    `Rule(("experts.W_up.kernel",), "experts.*.up.weight", "e i o -> e o i")`.

    Args:
        ours: names of parameters under one prefix.
        theirs: name of the entry under the same prefix.
        pattern: einops pattern from a parameter to its part of the entry; `""` leaves it as it is.
        axis: axis of the entry along which the parts are joined.
        interleaved: whether the parts take turns along the axis, instead of following one another.
        grouped: whether the first two axes of the joined parts become one, such as heads, each with
            its share of every part.
        beside: name of a parameter under the same prefix, without which the rule does not apply;
            `""` is none.

    Raises:
        ConversionError: if `ours` is no tuple of names, the pattern has not two sides, or a
            placeholder is in one name and not in another, or twice in one.
    """

    ours: tuple[str, ...]
    theirs: str
    pattern: str = ""
    axis: int = 0
    interleaved: bool = False
    grouped: bool = False
    beside: str = ""

    def __post_init__(self):
        # A name alone would be read letter by letter.
        if isinstance(self.ours, str):
            raise ConversionError(
                f"a rule has a tuple of names of ours, as several may be joined; got {self.ours!r}."
                f" Pass ({self.ours!r},)"
            )
        if self.pattern and self.pattern.count("->") != 1:
            raise ConversionError(
                "the pattern of a rule has two sides, as in 'i o -> o i'; got"
                f" {self.pattern!r} for {self.theirs}. Pass '' to leave the array as it is"
            )
        names = [*self.ours, self.theirs]
        if self.beside:
            names.append(self.beside)
        placeholders = [sorted(re.findall(r"{(\w+)}", name)) for name in names]
        once = sorted(set(placeholders[0]))
        reversible = all(found == once for found in placeholders)
        if not reversible:
            ours = ", ".join(self.ours)
            raise ConversionError(
                "a rule can be read both ways if each of its names has the same placeholders, each"
                f" once; got {ours} and {self.theirs}"
            )


@dataclass(frozen=True)
class Layout:
    """A named way to store the weights of a module.

    Args:
        rules: rules in the order in which they are tried; a parameter belongs to the first rule
            that has all of its parts.
        ignored: regular expression for other names that a state dict may hold, such as a mask
            buffer.
        refuse: function of a submodule that returns why this layout cannot store it, or None.
    """

    rules: tuple[Rule, ...]
    ignored: str = ""
    refuse: Callable[[object], str | None] = lambda module: None


@dataclass(frozen=True)
class Entry:
    """One rule applied to one module.

    Args:
        rule: rule that is applied.
        ours: full names of the parameters.
        theirs: full name of the entry.
        shapes: shapes of the parameters.
        axes: sizes of einops axes that the shapes do not give.
        trainable: False for running statistics, which are loaded and stored but have no gradient.
        whole: the entry that this one is a piece of, as `apart` returns it; None if it is whole.
    """

    rule: Rule
    ours: tuple[str, ...]
    theirs: str
    shapes: tuple[Shape, ...]
    axes: Mapping[str, int]
    trainable: bool = True
    whole: Entry | None = None

    def join(self, arrays: Arrays) -> np.ndarray:
        """Return the entry made from our parameters, as an array of its own."""
        named = zip(self.ours, self.shapes, strict=True)
        parts = [self._arrange(arrays[name], shape) for name, shape in named]
        if self.rule.interleaved:
            return np.stack(parts, self.rule.axis + 1).reshape(self.shape)
        # A number alone has no axis to be joined along.
        joined = np.concatenate(parts, self.rule.axis) if len(parts) > 1 else parts[0]
        return np.array(joined.reshape(self.shape), order="C")

    def split(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return our parameters made from the entry, as arrays of their own."""
        return {name: np.array(part, order="C") for name, part in self.parts(array).items()}

    def parts(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return our parameters made from the entry, sharing its memory."""
        cut = zip(self.ours, self.shapes, self._cut(array), strict=True)
        return {name: self._arrange(part, shape, back=True) for name, shape, part in cut}

    @property
    def tensors(self) -> dict[str, Shape]:
        """The shape of what is stored by its name: of the entry, or of each of its pieces."""
        whole = self.shape
        stored = whole[1:] if self.in_pieces else whole
        return dict.fromkeys(stored_names(self.theirs, whole), stored)

    def pieces(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return what is stored of the entry, by its name."""
        if not self.in_pieces:
            return {self.theirs: array}
        return dict(zip(self.tensors, array, strict=True))

    def joined(self, stored: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the entry made from what is stored of it: the inverse of `pieces`."""
        arrays = [stored[name] for name in self.tensors]
        return np.stack(arrays) if self.in_pieces else arrays[0]

    @property
    def in_pieces(self) -> bool:
        """Whether it is stored in pieces."""
        return "*" in self.theirs

    def apart(self) -> list[Entry]:
        """Return the pieces as entries of their own, each made of pieces of our parameters.

        Those of a parameter are named by their numbers: `w.0` and `w.1` are the pieces of `w`.

        Raises:
            ConversionError: if each piece is not made of one index of an axis of ours.
        """
        if not self.in_pieces:
            return [self]
        if not self._is_cut_along_an_axis():
            raise ConversionError(
                f"each piece of {self.theirs} is compared with one index of an axis of"
                f" {' and '.join(self.ours)}; its rule makes a piece of several. Begin its pattern"
                " with an axis of its own on both sides, as in 'e i o -> e o i', and join along"
                " another one"
            )
        return [self._piece(i, theirs) for i, theirs in enumerate(self.tensors)]

    def _piece(self, index: int, theirs: str) -> Entry:
        ours = tuple(piece_name(name, index) for name in self.ours)
        pattern = " -> ".join(_without_axis(side, self._counted) for side in self._sides)
        axis = self.rule.axis - 1 if self.rule.axis > 0 else self.rule.axis
        rule = replace(self.rule, ours=ours, theirs=theirs, pattern=pattern, axis=axis)
        shapes = tuple(_without(shape, self.list_axis) for shape in self.shapes)
        return Entry(rule, ours, theirs, shapes, self.axes, self.trainable, whole=self)

    @property
    def list_axis(self) -> int:
        """The axis of our parameters that counts the pieces."""
        return self._sides[0].index(self._counted) if self._sides else 0

    @property
    def _sides(self) -> list[list[str]]:
        """The axes on both sides of the pattern; none without a pattern."""
        return [axes_of_side(side) for side in self.rule.pattern.split(" -> ") if side]

    @property
    def _counted(self) -> str:
        """The axis in the pattern that counts the pieces."""
        return self._sides[1][0] if self._sides else ""

    def _is_cut_along_an_axis(self) -> bool:
        """Whether each piece is made of one index of an axis of each of our parameters."""
        is_joined = len(self.ours) > 1 and self.rule.axis == 0
        if is_joined or self.rule.grouped:
            return False
        return not self._sides or self._begins_with_an_axis()

    def _begins_with_an_axis(self) -> bool:
        """Whether the first axis of the entry is one of ours, whose place is known."""
        left, (first, *_) = self._sides
        if not first.isidentifier() or first not in left:
            return False
        # Behind an ellipsis the place of an axis is not known.
        return "..." not in left[: left.index(first)]

    @property
    def their_shapes(self) -> list[Shape]:
        """The shape of each part within the entry."""
        # An element seen in any shape takes no more memory.
        one = np.empty((), bool)
        return [self._arrange(np.broadcast_to(one, s), s).shape for s in self.shapes]

    @property
    def shape(self) -> Shape:
        """The shape of the entry."""
        joined, *others = map(list, self.their_shapes)
        for shape in others:
            joined[self.rule.axis] += shape[self.rule.axis]
        if self.rule.grouped:
            joined[:2] = [joined[0] * joined[1]]
        return tuple(joined)

    def fits_together(self) -> bool:
        """Whether the parts agree on all axes but the one they are joined along."""
        axis = self.rule.axis
        rests = {shape[:axis] + shape[axis + 1 :] for shape in self.their_shapes}
        return len(self.ours) == 1 or len(rests) == 1

    def _cut(self, array: np.ndarray) -> list[np.ndarray]:
        axis = self.rule.axis
        count = len(self.ours)
        if self.rule.grouped:
            groups = self.their_shapes[0][0]
            array = array.reshape(groups, -1, *array.shape[1:])
        if count == 1:
            return [array]
        if self.rule.interleaved:
            # With the axis in front, each part is every so-many-th row.
            rows = np.moveaxis(array, axis, 0)
            parts = [rows[i::count] for i in range(count)]
            return [np.moveaxis(part, 0, axis) for part in parts]
        widths = [shape[axis] for shape in self.their_shapes]
        return np.split(array, np.cumsum(widths)[:-1], axis)

    def _arrange(self, array: np.ndarray, shape: Shape, back: bool = False) -> np.ndarray:
        """Bring a parameter of this shape to its place in the entry, or back."""
        if not self.rule.pattern:
            return array
        left, right = self.rule.pattern.split(" -> ")
        pattern = f"{right} -> {left}" if back else self.rule.pattern
        # einops refuses sizes of axes that the pattern does not have.
        known = re.findall(r"\w+", left)
        sizes = {axis: size for axis, size in self.axes.items() if axis in known}
        try:
            return rearrange(array, pattern, **sizes | _named(left, shape))
        except EinopsError as error:
            raise ConversionError(
                f"{', '.join(self.ours)} of shape {array.shape} does not read as {left!r}. "
                "Of stacked layers convert one at a time; for other modules write a Layout"
            ) from error


def stored_names(theirs: str, shape: Shape) -> list[str]:
    """Return the names by which an entry is stored: its own, or those of its pieces.

    Example:
        >>> stored_names("up.*.weight", (2, 3))
        ['up.0.weight', 'up.1.weight']
    """
    if "*" not in theirs:
        return [theirs]
    return [theirs.replace("*", str(i)) for i in range(shape[0])]


def piece_name(name: str, index: int) -> str:
    """Return the name of a piece of a parameter of ours."""
    return f"{name}.{index}"


def _without(shape: Shape, axis: int) -> Shape:
    return shape[:axis] + shape[axis + 1 :]


def _without_axis(side: list[str], axis: str) -> str:
    return " ".join(other for other in side if other != axis)


def axes_of_side(side: str) -> list[str]:
    """Return the axes of one side of a pattern; those in parentheses are one."""
    return re.findall(r"\([^)]*\)|\S+", side)


def _named(side: str, shape: Shape) -> dict[str, int]:
    """Return the sizes of the axes outside parentheses: all of `"i n h"`, only i of `"(n h) i"`."""
    axes = axes_of_side(side)
    if "..." in axes:
        # The axes after the ellipsis are counted from the end of the shape.
        at = axes.index("...")
        axes[at : at + 1] = ["..."] * (len(shape) - len(axes) + 1)
    return {axis: size for axis, size in zip(axes, shape, strict=False) if axis.isidentifier()}
