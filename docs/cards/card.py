"""A card: what is shown, how it is called, and what in PyTorch computes the same."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import flax_attn

Twin = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Card:
    """One card.

    Args:
        name: the heading.
        shows: public names of `flax_attn`; the first has the docstring that formula and references
            are taken from.
        take: when to use it.
        example: the code that is shown and run. It leaves `output`, which is compared.
        picture: the expression to draw, in terms of the example's names.
        alt: description of the picture.
        equals: the equivalent in PyTorch: a dotted name, and in brackets how it is called.
        twin: function that computes it from the example's names, with PyTorch in float64.
        proof: names of its rows in the table of the proof.
        formula: formula to show instead of the one in the docstring.
        reference: reference if the docstring has none, or words that select some of its own.
        axes: names of the rows and columns of the picture.
        eager: whether the example runs operation by operation, which is faster for cards that share
            their shapes.
    """

    name: str
    shows: tuple[str, ...]
    take: str
    example: str
    picture: str
    alt: str
    equals: str
    twin: Twin
    proof: tuple[str, ...]
    formula: str = ""
    reference: str = ""
    axes: tuple[str, str] = ("query", "key")
    eager: bool = False

    def __post_init__(self):
        object.__setattr__(self, "example", code(self.example))

    @property
    def slug(self) -> str:
        """The name of its link."""
        return "gallery-" + re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @property
    def dotted(self) -> str:
        """The name of what it equals, without how that is called."""
        return self.equals.split("(")[0]

    @property
    def shown_formula(self) -> str:
        """Its own formula, or that of the docstring."""
        return self.formula or formula_of(self.docstring)

    @property
    def docstring(self) -> str:
        """The docstring of what it shows first."""
        return inspect.getdoc(reduce(getattr, self.shows[0].split("."), flax_attn)) or ""

    @property
    def references(self) -> list[str]:
        """What it was published in: a reference of its own, or those of the docstring."""
        if "arXiv" in self.reference:
            return [self.reference]
        return [entry for entry in references_of(self.docstring) if self.reference in entry]


def formula_of(docstring: str) -> str:
    """Return the formula of a docstring.

    This is its first indented block, or else the code in backticks in its first line.
    """
    before = re.split(
        r"\n(?:Args|Attributes|Shapes|Raises|Returns|Example|References):\n", docstring
    )[0]
    blocks = re.findall(r"(?:^|\n\n)((?: {4}.*(?:\n|$))+)", before)
    if blocks:
        return textwrap.dedent(blocks[0]).rstrip()
    quoted = re.findall(r"`([^`]*)`", before.split("\n")[0])
    return next((text for text in quoted if not re.fullmatch(r"[\w.]+", text)), "")


def code(*parts: str) -> str:
    """Join the parts of an example, dedented, with a blank line after functions."""
    lines = (
        textwrap.dedent(part).strip() + ("\n" if "def " in part else "") for part in parts if part
    )
    return "\n".join(lines).rstrip()


def references_of(docstring: str) -> list[str]:
    """Return the entries of the references of a docstring."""
    _, found, text = docstring.partition("References:\n")
    entries = re.split(r";\s+|(?<=\d\)), (?=[A-Z])", " ".join(text.split()).rstrip("."))
    return [entry.rstrip(".") for entry in entries] if found else []
