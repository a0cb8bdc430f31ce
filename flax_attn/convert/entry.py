"""What rules make of the parameters of one module: an entry each, to export and to import."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from einops import EinopsError, rearrange

from flax_attn.convert.axis_cut import AxisCut, namespace
from flax_attn.convert.rules import Arrays, ConversionError, Rule, Shape

A = TypeVar("A")


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
        # A number alone has no axis to be joined along.
        joined = self._joint.join(parts) if len(parts) > 1 else parts[0]
        return np.array(joined.reshape(self.shape), order="C")

    def split(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return our parameters made from the entry, as arrays of their own."""
        return {name: np.array(part, order="C") for name, part in self.parts(array).items()}

    def parts(self, array: Any) -> dict[str, Any]:
        """Return our parameters made from the entry, sharing its memory where that is possible."""
        cut = zip(self.ours, self.shapes, self._cut(array), strict=True)
        return {name: self._arrange(part, shape, back=True) for name, shape, part in cut}

    @property
    def tensors(self) -> dict[str, Shape]:
        """The shape of what is stored by its name: of the entry, or of each of its pieces."""
        if not self.rule.names:
            stored = self.shape[1:] if self.is_list else self.shape
            return dict.fromkeys(self.names, stored)
        cut = self._names_cut
        return {name: cut.shape(self.shape, i) for i, name in enumerate(self.names)}

    @property
    def names(self) -> list[str]:
        """The names of what is stored: its own, or those of its pieces."""
        # The shape takes as long as all the rest, and most entries are whole.
        shape = self.shape if self.is_list else ()
        return stored_names(self.theirs, shape, self.rule.names)

    def pieces(self, array: Any) -> dict[str, Any]:
        """Return what is stored of the entry, by its name."""
        if self.rule.names:
            return dict(zip(self.names, self._names_cut.cut(array), strict=True))
        if self.is_list:
            return dict(zip(self.names, array, strict=True))
        return {self.theirs: array}

    def joined(self, stored: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the entry made from what is stored of it: the inverse of `pieces`."""
        arrays = [stored[name] for name in self.names]
        if self.rule.names:
            return self._names_cut.join(arrays)
        return np.stack(arrays) if self.is_list else arrays[0]

    @property
    def named_rule(self) -> Rule:
        """The rule with full names. What it asks for beside its own parameters is there."""
        return replace(self.rule, ours=self.ours, theirs=self.theirs, beside="")

    @property
    def is_list(self) -> bool:
        """Whether it is stored in pieces, one for each index of its first axis."""
        return "*" in self.theirs and not self.rule.names

    def apart(self) -> list[Entry]:
        """Return the pieces as entries of their own, each made of pieces of our parameters.

        Those of a parameter are named by their numbers, or by the names in their place: `w.0` and
        `w.1` are the pieces of `w`.

        Raises:
            ConversionError: if each piece is not made of one index of an axis of ours.
        """
        if self.rule.names:
            labels = zip(self.rule.names, self.tensors.items(), strict=True)
            return [self._named_piece(label, *tensor) for label, tensor in labels]
        if not self.is_list:
            return [self]
        if not self._is_cut_along_an_axis():
            raise ConversionError(
                f"each piece of {self.theirs} is compared with one index of an axis of"
                f" {' and '.join(self.ours)}; its rule makes a piece of several. Begin its pattern"
                " with an axis of its own on both sides, as in 'e i o -> e o i', and join along"
                " another one"
            )
        return [self._piece(i, theirs) for i, theirs in enumerate(self.tensors)]

    def _named_piece(self, label: str, theirs: str, shape: Shape) -> Entry:
        """Return a piece that lies in our parameter as in the entry."""
        ours = tuple(piece_name(name, label) for name in self.ours)
        return Entry(Rule(ours, theirs), ours, theirs, (shape,), {}, self.trainable, whole=self)

    def pieces_of_ours(self, name: str, array: A) -> dict[str, A]:
        """Return the pieces of one of our parameters as `apart` names them.

        The array may be one of NumPy or JAX, or traced.
        """
        pieces = self._cut_of_ours(array)
        labels = self.rule.names or range(len(pieces))
        return {piece_name(name, label): one for label, one in zip(labels, pieces, strict=True)}

    def _cut_of_ours(self, array: A) -> Sequence[A]:
        if self.rule.names:
            return self._names_cut.cut(self._arrange(array, self.shapes[0]))
        return list(namespace(array).moveaxis(array, self.list_axis, 0))

    def ours_of_pieces(self, pieces: Sequence[A]) -> A:
        """Return one of our parameters, made of its pieces: the inverse of `pieces_of_ours`."""
        if self.rule.names:
            (parameter,) = self.parts(self._names_cut.join(pieces)).values()
            return parameter
        return namespace(pieces[0]).stack(pieces, axis=self.list_axis)

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

    @property
    def _joint(self) -> AxisCut:
        """How our parameters make the entry."""
        axis = self.rule.axis
        widths = tuple(shape[axis] for shape in self.their_shapes)
        # Each of those that take turns has one row in each group.
        groups = widths[0] if self.rule.interleaved else self.rule.groups
        return AxisCut(axis, widths, groups)

    @property
    def _names_cut(self) -> AxisCut:
        """How the entry is cut into the tensors of several names.

        Raises:
            ConversionError: if the axis has no whole number of shares in each group.
        """
        axis = self.rule.axis
        shares = self.rule.shares or (1,) * len(self.rule.names)
        unit = self._unit(self.shape[axis], shares)
        return AxisCut(axis, tuple(unit * share for share in shares), self.rule.groups)

    def _unit(self, size: int, shares: Sequence[int]) -> int:
        """Return how wide a share of an axis is."""
        whole = sum(shares)
        groups = self.rule.groups
        count = whole * groups
        if size % count:
            (own,) = self.ours
            names = ", ".join(self.rule.names)
            raise ConversionError(
                f"{own} is cut along an axis of {size}, which is no multiple of {count}:"
                f" the shares {shares} in {groups} groups. Give the shares of {names} in the rule"
            )
        return size // whole

    def _cut(self, array: Any) -> list[Any]:
        if self.rule.grouped:
            groups = self.their_shapes[0][0]
            array = array.reshape(groups, -1, *array.shape[1:])
        return [array] if len(self.ours) == 1 else self._joint.cut(array)

    def _arrange(self, array: Any, shape: Shape, back: bool = False) -> Any:
        """Bring a parameter of this shape to its place in the entry, or back."""
        if not self.rule.pattern:
            return array
        left, right = self.rule.pattern.split(" -> ")
        pattern = f"{right} -> {left}" if back else self.rule.pattern
        # einops refuses sizes of axes that the pattern does not have.
        known = re.findall(r"\w+", left)
        sizes = {axis: size for axis, size in self.axes.items() if axis in known}
        given = array if back else self._flip(array)
        try:
            arranged = rearrange(given, pattern, **sizes | _named(left, shape))
        except EinopsError as error:
            raise ConversionError(
                f"{', '.join(self.ours)} of shape {array.shape} does not read as {left!r}. "
                "Of stacked layers convert one at a time; for other modules write a Layout"
            ) from error
        return self._flip(arranged) if back else arranged

    def _flip(self, array: Any) -> Any:
        """Return a parameter of ours with the flipped axes of the rule from the other end."""
        if not self.rule.flipped:
            return array
        left = self._sides[0]
        # Behind an ellipsis an axis is counted from the end.
        before = len(left) if "..." in left else 0
        places = tuple(left.index(axis) - before for axis in self.rule.flipped)
        return namespace(array).flip(array, axis=places)


def stored_names(theirs: str, shape: Shape, names: Sequence[str] = ()) -> list[str]:
    """Return the names by which an entry is stored: its own, or those of its pieces.

    Example:
        >>> stored_names("up.*.weight", (2, 3))
        ['up.0.weight', 'up.1.weight']
        >>> stored_names("*_proj.weight", (9, 3), ("q", "k", "v"))
        ['q_proj.weight', 'k_proj.weight', 'v_proj.weight']
    """
    if "*" not in theirs:
        return [theirs]
    labels = names or map(str, range(shape[0]))
    return [theirs.replace("*", label) for label in labels]


def piece_name(name: str, label: str | int) -> str:
    """Return the name of a piece of a parameter of ours."""
    return f"{name}.{label}"


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
