"""What two runs compute differently, as data."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

from flax_attn.parity.trace.definitions import definitions
from flax_attn.parity.trace.program import Node, Place

# Lines of source of one side that are named.
SHOWN = 3
# Numbers that count layers, or bound a slice.
COUNTED = re.compile(r"(?<=\.)\d+(?=\.)|\[[^\]]*\]|_\d+\b")

# Numbers of a table, which each layer may have of its own.
TABLE = re.compile(r"(?<=\barray )[x\d]+ (from [-+.\w]+ to [-+.\w]+|of [-+.\w]+( and [-+.\w]+)*)")
# A name of a value, which is none of a function.
NAME = re.compile(r"input \d+|[A-Za-z_][\w.]*(?![\w.(])")
# What says more than which value is taken: a number, or a function.
CALCULATED = re.compile(r"[\d(]")


@dataclass(frozen=True)
class Side:
    """What one side has at a difference.

    Args:
        value: what differs, in plain notation; empty where this side has nothing.
        expression: the whole expression that it is in, over values that both sides have.
        places: lines of source of what differs, the innermost first.
        length: characters of what differs, written over values that both sides have.
    """

    value: str
    expression: str
    places: tuple[Place, ...]
    length: int = 0

    @property
    def place(self) -> str:
        """The first line of source, as `file:line`; empty where none is known."""
        return str(self.places[0]) if self.places else ""

    @cached_property
    def definitions(self) -> tuple[Place, ...]:
        """The lines that define the constants which the first lines read, the nearest first."""
        shown = self.places[:SHOWN]
        lines = [(place.file, place.line) for place in shown]
        defined = dict.fromkeys(chain.from_iterable(map(definitions, shown)))
        return tuple(place for place in defined if (place.file, place.line) not in lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the side for JSON."""
        places = []
        for place in self.places:
            caller = place.caller and {"file": place.caller[0], "line": place.caller[1]}
            places.append({**_line(place), "caller": caller})
        return {
            "value": self.value,
            "expression": self.expression,
            "place": self.place,
            "places": places,
            "definitions": [_line(place) for place in self.definitions],
        }


def _line(place: Place) -> dict[str, Any]:
    return {"file": place.file, "line": place.line, "source": place.source}


@dataclass(frozen=True)
class Hypothesis:
    """One difference between the two programs.

    Args:
        node: path of the submodule of PyTorch in which it stands; empty at the top.
        operation: operation that differs.
        parameter: what differs about it: `"factor"`, `"term"`, `"padding"`, `"layout"`, ...
        flax: what JAX has.
        torch: what PyTorch has.
        also: paths of other submodules with the same difference.
        note: how the order of JAX's numbers differs from PyTorch's, in words; empty where it does
            not.
        backward: whether it is in the backward pass, where a name is that of a gradient.
        doubtful: whether outputs still differ with the values of PyTorch in its place.
    """

    node: str
    operation: str
    parameter: str
    flax: Side
    torch: Side
    also: tuple[str, ...] = ()
    note: str = ""
    backward: bool = False
    doubtful: bool = False

    @property
    def kind(self) -> tuple[Any, ...]:
        """What hypotheses of repeated layers and of repeated steps have in common."""
        # Layers and steps differ in numbers within names and bounds, and in the order of terms.
        values = []
        for side in (self.flax, self.torch):
            values.append(COUNTED.sub("", TABLE.sub("", side.value)))
        # In a rotation a wrong sign here is the opposite one there.
        formulas = [NAME.sub("x", value).replace("-", "") for value in values]
        if all(map(CALCULATED.search, formulas)):
            # A function that is used on many lines is wrong on all of them.
            return self.operation, self.parameter, *formulas
        words = [tuple(sorted(re.findall(r"[\w.]+", value))) for value in values]
        # One line of JAX may be what several of PyTorch are, and is wrong once.
        place = self.flax.place or self.torch.place
        if words[0] == ("array",):
            return self.operation, self.parameter, "array", place
        return self.operation, self.parameter, *words, place

    def as_dict(self) -> dict[str, Any]:
        """Return the hypothesis for JSON."""
        return {
            "node": self.node,
            "operation": self.operation,
            "parameter": self.parameter,
            "flax": self.flax.as_dict(),
            "torch": self.torch.as_dict(),
            "also": list(self.also),
            "note": self.note,
        }


def grouped_by_kind(every: Iterable[Hypothesis]) -> tuple[Hypothesis, ...]:
    """Return hypotheses, of which those of repeated layers are one."""
    grouped: dict[tuple, Hypothesis] = {}
    for one in every:
        first = grouped.setdefault(one.kind, one)
        if first is not one:
            grouped[one.kind] = _with_repeat(first, one)
    return tuple(grouped.values())


def _with_repeat(first: Hypothesis, other: Hypothesis) -> Hypothesis:
    """Return a hypothesis with the submodule and the lines of another of its kind."""
    also = first.also
    if other.node not in (first.node, *also):
        also = (*also, other.node)
    sides = []
    for own, its in ((first.flax, other.flax), (first.torch, other.torch)):
        lines = {(place.file, place.line) for place in own.places}
        more = [place for place in its.places[:1] if (place.file, place.line) not in lines]
        sides.append(replace(own, places=(*own.places, *more)))
    return replace(first, also=also, flax=sides[0], torch=sides[1])


def places(nodes: Iterable[Node]) -> tuple[Place, ...]:
    """Return the lines of nodes, each once."""
    # Two calls of one function differ in their caller and are one line.
    lines: dict[tuple[str, int] | None, Place] = {}
    for node in nodes:
        if node.place is not None:
            lines.setdefault(node.line, node.place)
    return tuple(lines.values())
