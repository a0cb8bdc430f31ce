"""Why two models do not pair: every problem in one message."""

from collections.abc import Iterator, Sequence
from itertools import product

from flax_attn.convert.match.matcher import Item, Matching
from flax_attn.convert.match.names import key_of
from flax_attn.convert.match.tree import PARAMETER, RECURRENT, Layer, layers_of

# The most lines in a message, and in one of modules that are built in other sizes.
SHOWN = 20
SHOWN_OF_OTHER_SIZES = 5
# From so many layers on each side it is no accident that all have sizes of their own.
LAYERS_OF_OTHER_SIZES = 3


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
    # The parts of a packed tensor have the same line.
    lines = list(dict.fromkeys(lines))
    sizes = _other_sizes(found)
    most = SHOWN_OF_OTHER_SIZES if sizes else SHOWN
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    remedy = (
        f"Name them alike, or pair them by rules: convert.auto(..., rules=[{_example(found)}, ...])"
    )
    return "\n  ".join([heading, *sizes, *lines[:most], *more]) + "\n" + remedy


def _other_sizes(found: Matching) -> list[str]:
    """Return a line where each layer without a partner has a size that the other module lacks."""
    ours = _sizes_of(found.ours)
    theirs = _sizes_of(found.theirs)
    only_ours = ours - theirs
    only_theirs = theirs - ours
    if not (_all_have(found.ours, only_ours) and _all_have(found.theirs, only_theirs)):
        return []
    return [
        f"only flax has the sizes {_numbers(only_ours)}, and only torch {_numbers(only_theirs)}:"
        " build both modules in the same sizes"
    ]


def _all_have(layers: Sequence[Layer], sizes: set[int]) -> bool:
    """Return whether these are many layers, and each has one of the sizes."""
    many = len(layers) >= LAYERS_OF_OTHER_SIZES
    return many and all(_sizes_of([layer]) & sizes for layer in layers)


def _sizes_of(layers: Sequence[Layer]) -> set[int]:
    found = set()
    for layer in layers:
        for part in layer.parts.values():
            found.update(part.tensor.shape)
    return found


def _numbers(sizes: set[int]) -> str:
    return ", ".join(map(str, sorted(sizes)))


def _lone_parts(found: Matching) -> list[str]:
    """Return the parameters that only one of two partners has."""
    lines = []
    for one, other, _ in found.pairs:
        lines += _roles_without("flax", one, other) + _roles_without("torch", other, one)
    return lines


def _roles_without(framework: str, mine: Layer, yours: Layer) -> list[str]:
    lines = []
    for role in mine.parts.keys() - yours.parts.keys():
        tensor = mine.parts[role].tensor
        own = f"{framework} {tensor.name} {tensor.shape}"
        lines.append(f"no partner for {own}: {'.'.join(yours.path)} has no {role}")
    return lines


def _lone_layers(found: Matching) -> list[str]:
    lines = []
    for layer in found.ours:
        lines.append(f"no partner for flax {_text(layer)}{_hint(layer, found.theirs)}")
    for layer in found.theirs:
        lines.append(f"no partner for torch {_text(layer)}{_hint(layer, found.ours)}")
    return lines


def _hint(layer: Layer, others: Sequence[Layer]) -> str:
    """Return what may be the reason."""
    # A fused projection in an unknown order is not guessed.
    if "qkv" in key_of(layer.path).words:
        return ". In which order it holds query, key and value is not known"
    if layer.kind in RECURRENT:
        return ". In which order yours holds the gates is not known: keep this name and shape"
    near = [other for other in others if key_of(other.path) == key_of(layer.path)]
    return f"; by name {_text(near[0])}" if near else ""


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
    for pair in _likely_pairs(found):
        ours, theirs = map(_first_tensor, pair)
        return f"Rule(({ours!r},), {theirs!r})"
    return "Rule((flax_name,), torch_name)"


def _likely_pairs(found: Matching) -> Iterator[tuple[Item, Item]]:
    for ours, theirs in found.ambiguous:
        yield ours[0], theirs[0]
    yield from found.conflicts
    for one, other in product(found.ours, found.theirs):
        if key_of(one.path) == key_of(other.path):
            yield one, other


def _first_tensor(item: Item) -> str:
    layer = next(layers_of(item))
    return next(iter(layer.parts.values())).tensor.name
