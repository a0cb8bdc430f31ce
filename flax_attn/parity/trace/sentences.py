"""Hypotheses in words: the only place where a sentence about a difference is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flax_attn.parity.listed import listed
from flax_attn.parity.trace.hypothesis import SHOWN, Hypothesis, Side
from flax_attn.parity.trace.notation import LONGEST
from flax_attn.parity.trace.program import Place

if TYPE_CHECKING:
    from flax_attn.parity.trace.compiler import Miscompiled
    from flax_attn.parity.trace.difference import Difference

# Submodules with the same difference that are named.
NAMED = 3
# Lines of one side that define constants.
DEFINED = 8
# What differs as a whole expression.
PARTS = ("operation", "operand", "term", "base", "order", "sign", "bounds")


def headline(found: Hypothesis) -> str:
    """Return what differs, in a sentence without an end."""
    paths = [path or "the whole module" for path in (found.node, *found.also)]
    where, *others = paths
    if others:
        where = f"{where} (also {listed(others, NAMED)})"
    run = "in the backward pass " if found.backward else ""
    doubt = "perhaps " if found.doubtful else ""
    return f"{where}: {run}{doubt}{_difference(found)}"


def edit(found: Hypothesis) -> str:
    """Return what to change in the JAX module."""
    where = f"in {found.flax.place}: " if found.flax.places else ""
    ours, theirs = found.flax.value, found.torch.value
    if found.parameter == "rounding":
        return f"{where}take the numbers of {theirs}, or build both in float64"
    if found.parameter == "steps":
        return f"{where}run the steps {theirs}"
    if found.parameter == "exchange":
        return f"{where}exchange {ours}"
    if not theirs:
        return f"{where}remove {ours}"
    if not ours:
        return f"{where}add {theirs}"
    return f"{where}{theirs} for {ours}"


def miscompiled(found: Miscompiled) -> str:
    """Return what XLA computes wrongly, in a sentence without an end."""
    where = f" at {', '.join(map(str, found.places[:NAMED]))}" if found.places else ""
    return (
        f"XLA miscompiles this{where}: compiled it errs by {found.error:.3g}, and operation by"
        " operation JAX equals PyTorch, so it is no fault of the port"
    )


def lines_of_miscompiled(found: Miscompiled) -> Iterator[str]:
    """Yield the sentence, lines of source, the settings that were tried, and a reproduction."""
    yield miscompiled(found)
    for place in found.places[:NAMED]:
        yield f"  {place}  {_short(place.source)}"
    if found.jaxpr:
        yield f"  right with {', '.join(found.helps) or 'no setting that was tried'}"
        yield f"  wrong as well with {', '.join(found.useless) or 'none'}"
    if found.script:
        yield "  this script shows it without flax_attn:"
    elif found.note:
        yield f"  there is no script that shows it: {found.note}"
    # Where no script can be written, the program itself is shown.
    shown = found.script or found.jaxpr
    for line in shown.splitlines():
        yield f"    {line}".rstrip()


def proof(found: Difference) -> str:
    """Return what the replacements by values of PyTorch prove."""
    what = "gradients" if found.backward else "outputs"
    count = len(found.hypotheses)
    if not count and not found.remaining:
        return (
            "outputs and gradients agree in float64, operation by operation: the checks that fail"
            " say what differs"
        )
    if not count:
        ended = "the search takes no longer, and so far " if found.ended else ""
        return f"{ended}no operation explains the difference of the {what}"
    if found.unproven:
        return "the shapes differ from here on, so that no value of PyTorch can be put in: no proof"
    places = "this place" if count == 1 else f"these {count} places"
    if found.repaired and found.hypotheses[0].parameter == "gradient":
        return f"proof: without {places.replace('place', 'stop')} all {what} are equal"
    if found.repaired and found.hypotheses[0].parameter == "steps":
        return f"proof: with the steps in the order of torch all {what} are equal"
    if found.unnamed:
        return (
            f"with the values of PyTorch at {places} all {what} are equal: no single cause is known"
        )
    if found.repaired:
        return f"proof: with the values of PyTorch at {places} all {what} are equal"
    left = ", ".join(found.remaining[:NAMED])
    ended = ". The search takes no longer: mend these, and compare again" if found.ended else ""
    return f"with the values of PyTorch at {places} {left} still differs{ended}"


def _difference(found: Hypothesis) -> str:
    ours, theirs = _short(found.flax.value), _short(found.torch.value)
    if found.parameter == "layout":
        note = f": in flax {found.note}" if found.note else ""
        return f"the same numbers are laid out differently{note}"
    if found.parameter == "rounding":
        return (
            f"{ours} of flax and {theirs} of torch agree to {found.note} alone, as tables do that"
            " are built in float32: build both in float64, or take the numbers of one"
        )
    if found.parameter == "expression":
        return "both compute something else from the same values"
    side, other = _sides(bool(ours))
    if found.parameter == "exchange":
        first, second = found.torch.value.split(" and ", 1)
        return f"flax takes {first} where torch takes {second}, and the other way round"
    if found.parameter == "gradient":
        return f"{side} stops the gradient here by {found.operation}, {other} does not"
    if not ours or not theirs:
        kind = {"sum": "adds", "product": "multiplies by"}.get(found.operation, "has")
        return f"{side} {kind} {ours or theirs}, {other} does not"
    return _both_have(found, ours, theirs)


def _both_have(found: Hypothesis, ours: str, theirs: str) -> str:
    if found.parameter == "constant":
        return f"flax adds {ours}, torch {theirs}"
    if found.parameter == "factor" and {ours, theirs} == {"1", "-1"}:
        side, other = _sides(ours == "-1")
        return f"{side} changes the sign, {other} does not"
    if found.parameter == "factor":
        return f"flax multiplies by {ours}, torch by {theirs}"
    if found.parameter in ("axes", "axis", "over"):
        operation = found.operation.removesuffix("_over")
        return f"flax has the {operation} over {ours}, torch over {theirs}"
    if found.parameter == "steps":
        return f"flax runs the steps of the {found.operation} {ours}, torch {theirs}"
    if found.parameter == "value":
        return f"flax has {ours}, torch {theirs}"
    if found.parameter in PARTS:
        return f"flax has {ours}, torch has {theirs}"
    return f"flax has {found.parameter} {ours}, torch {theirs}"


def _sides(in_flax: bool) -> tuple[str, str]:
    """Return the side that has something, and the other one."""
    return ("flax", "torch") if in_flax else ("torch", "flax")


def lines(found: Hypothesis) -> Iterator[str]:
    """Yield the sentence, and both sides with their lines of source."""
    yield headline(found)
    # These two have their note in the sentence.
    if found.note and found.parameter not in ("layout", "rounding"):
        yield f"  {found.note}"
    for name, side in (("flax ", found.flax), ("torch", found.torch)):
        if not side.expression:
            continue
        yield f"  {name} {_place(side)}  {_short(_shown(found, side))}"
        source = side.places[0].source if side.places else ""
        if source:
            yield f"        {_short(source)}"
        if side.definitions:
            yield f"        constants defined in {_lines_of(side.definitions)}"


def _place(side: Side) -> str:
    if not side.places:
        return "(no line known)"
    first = side.places[0]
    others = [place for place in side.places[1:] if place.file == first.file][: SHOWN - 1]
    shown = str(first) + "".join(f", {place.line}" for place in others)
    lines = [(place.file, place.line) for place in (first, *others)]
    callers = [place.caller for place in (first, *others) if place.caller]
    # A caller that is shown itself says nothing more.
    for file, line in callers:
        if (file, line) not in lines:
            return f"{shown} (called in {Path(file).name}:{line})"
    return shown


def _lines_of(places: Sequence[Place]) -> str:
    """Return the nearest lines by file, in order, as `port.py:3, 7-9`."""
    files: dict[str, list[int]] = {}
    for place in places[:DEFINED]:
        files.setdefault(Path(place.file).name, []).append(place.line)
    return ", ".join(f"{name}:{_ranges(sorted(lines))}" for name, lines in files.items())


def _ranges(lines: Sequence[int]) -> str:
    ranges: list[list[int]] = []
    for line in lines:
        if ranges and line == ranges[-1][1] + 1:
            ranges[-1][1] = line
        else:
            ranges.append([line, line])
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in ranges)


def _shown(found: Hypothesis, side: Side) -> str:
    if found.parameter == "layout" and side.value:
        return f"{side.expression}, by {side.value}"
    return side.expression


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."
