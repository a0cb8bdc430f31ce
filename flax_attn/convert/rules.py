"""Invertible rules from the parameters of a module to the entries of a layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

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
    "layer.{i}.ln.weight")` renames in every block.

    An entry with `*` in its name is stored in pieces. Without `names`, `*` is the index of its
    first axis: `Rule(("experts.W_up.kernel",), "experts.*.up.weight", "e i o -> e o i")`. Names
    take the place of `*` where one parameter holds several: `Rule(("qkv.kernel",),
    "*_proj.weight", "i o -> o i", names=("q", "k", "v"))`.

    Args:
        ours: names of parameters under one prefix.
        theirs: name of the entry under the same prefix.
        pattern: einops pattern from a parameter to its part of the entry; `""` leaves it as it is.
        axis: axis of the entry along which it is joined from several parameters, or cut into those
            of several names.
        interleaved: whether the parts take turns along the axis, instead of following one another.
        grouped: whether the first two axes of the joined parts become one, such as heads, each with
            its share of every part.
        beside: name of a parameter under the same prefix, without which the rule does not apply;
            `""` is none.
        names: names of the pieces along the axis, each in place of `*`.
        shares: share of the axis that each name has, such as `(4, 1, 1)`; they are equal without.
        groups: number of groups along the axis, such as heads, each with its share of every part.
        sizes: axes of the pattern with their sizes, such as `(("p", 4),)`, where the shape of a
            parameter does not give them.
        flipped: axes of the pattern that the entry has from the other end, as PyTorch's transposed
            convolutions have those of the kernel.

    Raises:
        ConversionError: if `ours` is no tuple of names, the pattern has not two sides, a
            placeholder is in one name and not in another, or twice in one, or `names` or `flipped`
            do not fit the rest.
    """

    ours: tuple[str, ...]
    theirs: str
    pattern: str = ""
    axis: int = 0
    interleaved: bool = False
    grouped: bool = False
    beside: str = ""
    names: tuple[str, ...] = ()
    shares: tuple[int, ...] = ()
    groups: int = 1
    sizes: tuple[tuple[str, int], ...] = ()
    flipped: tuple[str, ...] = ()

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
        if self.groups < 1:
            raise ConversionError(
                f"an axis has at least one group; got groups={self.groups} for {self.theirs}"
            )
        self._check_placeholders()
        self._check_names()
        self._check_flipped()

    def __repr__(self) -> str:
        """Return the call that makes it, with the pattern by position."""
        by_position = [self.ours, self.theirs, self.pattern]
        shown = [repr(value) for value in by_position if value]
        shown += [f"{name}={value!r}" for name, value in self._options().items()]
        return f"Rule({', '.join(shown)})"

    @property
    def change(self) -> str:
        """The pattern, and the axes that are flipped; empty where the array stays as it is."""
        axes = " and ".join(self.flipped)
        return f"{self.pattern}, {axes} flipped" if axes else self.pattern

    def _options(self) -> dict[str, Any]:
        """Return the arguments behind the pattern that are not left as they are by default."""
        options = {field: getattr(self, field.name) for field in fields(self)[3:]}
        return {field.name: value for field, value in options.items() if value != field.default}

    def _check_placeholders(self) -> None:
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

    def _check_flipped(self) -> None:
        left = self.pattern.partition(" -> ")[0].split()
        unknown = [axis for axis in self.flipped if axis not in left]
        if unknown or isinstance(self.flipped, str):
            raise ConversionError(
                "flipped axes are a tuple of axes on the left side of the pattern; got"
                f" {self.flipped!r} for {self.pattern!r}"
            )

    def _check_names(self) -> None:
        if not self.names:
            if self.shares:
                raise ConversionError(
                    f"shares are those of names; got shares {self.shares} without names. Pass names"
                )
            return
        if isinstance(self.names, str) or self.theirs.count("*") != 1:
            raise ConversionError(
                "names are a tuple, and each takes the place of the one * in the name of the entry;"
                f" got {self.names!r} for {self.theirs}"
            )
        if len(self.ours) > 1:
            ours = ", ".join(self.ours)
            raise ConversionError(
                f"a rule joins several parameters, or cuts one into several names; got {ours} and"
                f" names {self.names}. Write a rule for each parameter"
            )
        if self.shares and len(self.shares) != len(self.names):
            raise ConversionError(
                f"each name has a share; got names {self.names} and shares {self.shares}"
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
