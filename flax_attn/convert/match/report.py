"""Why two models do not pair: every problem in one message."""

from __future__ import annotations

from collections.abc import Sequence

from flax_attn.convert.match.matcher import Item, Matching
from flax_attn.convert.match.names import key_of
from flax_attn.convert.match.tree import PARAMETER, Layer, layers_of

SHOWN = 20  # lines of a message


def problems_of(found: Matching) -> list[str]:
    """Return a line for every layer with no partner, several, or one that contradicts its name."""
    lines = _lone_parts(found) + _lone_layers(found)
    for one, other in found.conflicts:
        differ = "names" if one.fits(other) else "kinds"
        lines.append(
            f"flax {_text(one)} and torch {_text(other)} are in the same place, but their {differ}"
            " differ"
        )
    for ours, theirs in found.ambiguous:
        lines.append(
            f"ambiguous: flax {_texts(ours)} fit torch {_texts(theirs)} in more than one way"
        )
    return lines


def message(heading: str, lines: Sequence[str], found: Matching) -> str:
    """Return the whole error."""
    shown = [*lines[:SHOWN], *([f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])]
    remedy = (
        f"Name them alike, or pair them by rules: convert.auto(..., rules=[{_example(found)}, ...])"
    )
    return "\n  ".join([heading, *shown]) + "\n" + remedy


def _lone_parts(found: Matching) -> list[str]:
    """Return the parameters that only one of two partners has."""
    lines = []
    for one, other, _ in found.pairs:
        for framework, mine, yours in (("flax", one, other), ("torch", other, one)):
            for role in mine.parts.keys() - yours.parts.keys():
                tensor = mine.parts[role].tensor
                there = ".".join(yours.path)
                lines.append(
                    f"no partner for {framework} {tensor.name} {tensor.shape}: {there} has no"
                    f" {role}"
                )
    return lines


def _lone_layers(found: Matching) -> list[str]:
    lines = []
    for framework, mine, yours in (
        ("flax", found.ours, found.theirs),
        ("torch", found.theirs, found.ours),
    ):
        for layer in mine:
            lines.append(f"no partner for {framework} {_text(layer)}{_hint(layer, yours)}")
    return lines


def _hint(layer: Layer, others: Sequence[Layer]) -> str:
    """Return what may be the reason."""
    if "qkv" in key_of(layer.path).words:
        return ". In which order it holds query, key and value is not known"
    if layer.kind == "ConvTranspose" and "value" in layer.parts:
        return ". PyTorch's kernel is flipped: build it with transpose_kernel=True"
    near = next((other for other in others if key_of(other.path) == key_of(layer.path)), None)
    return f"; by name {_text(near)}" if near else ""


def _text(item: Item) -> str:
    """Return an item as its kind and its tensors."""
    if not isinstance(item, Layer):
        return f"{'.'.join(item.path)} ({sum(1 for _ in layers_of(item))} layers)"
    tensors = {part.tensor.name: part for part in item.parts.values()}
    names = ", ".join(f"{name} {part.tensor.shape}" for name, part in tensors.items())
    return names if item.kind == PARAMETER else f"{names} ({item.kind})"


def _texts(items: Sequence[Item]) -> str:
    return "; ".join(map(_text, items))


def _example(found: Matching) -> str:
    """Return a rule as one would write it for the first problem."""
    namesakes = [
        ([one], [other])
        for one in found.ours
        for other in found.theirs
        if key_of(one.path) == key_of(other.path)
    ]
    pairs = [*found.ambiguous, *(([one], [other]) for one, other in found.conflicts), *namesakes]
    for ours, theirs in pairs:
        names = [
            next(iter(next(layers_of(side[0])).parts.values())).tensor.name
            for side in (ours, theirs)
        ]
        return f"Rule(({names[0]!r},), {names[1]!r})"
    return "Rule((flax_name,), torch_name)"
