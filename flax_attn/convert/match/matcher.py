"""Match two trees of layers by kind and shape, then by name, number and order, without a guess."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from flax_attn.convert.match.names import ATTENTION_INPUTS, Key, distinguishing, in_order, key_of
from flax_attn.convert.match.tree import Group, Layer, layers_of

Item = Layer | Group
Evidence = Literal["shape", "name", "number", "order", "outputs"]
Keys = Sequence[Hashable]
Settled = tuple[Item, Item, Evidence]
Signature = Callable[[Layer], Hashable]
# None where it cannot be told.
Pairs = list[Settled] | None
Way = Callable[[list[Item], list[Item]], Pairs]
# Which of their items is the partner of each of ours, by what ours are called in all layers.
Orders = Mapping[tuple[str, ...], Sequence[int]]

# The items whose orders are tried, where it is in doubt.
MOST_ITEMS = 4


def exact(layer: Layer) -> Hashable:
    """Return what two layers must share: family, roles and sizes."""
    return layer.family, tuple(sorted((role, part.sizes) for role, part in layer.parts.items()))


def main_part(layer: Layer) -> Hashable:
    """Return the family and sizes of the main parameter, to report what differs in the rest."""
    return layer.family, next(iter(layer.parts.values())).sizes


@dataclass
class Matching:
    """What was found.

    Args:
        pairs: layers that belong together, ours first, with the evidence.
        ambiguous: items that fit equally well, ours first.
        conflicts: layers in the same place with contradictory names or kinds.
        ours: our layers without a partner.
        theirs: their layers without a partner.
        orders: choices for items that names do not tell apart.
        doubt: whether the order of a few items says nothing, unless `orders` has it.
    """

    pairs: list[tuple[Layer, Layer, Evidence]] = field(default_factory=list)
    ambiguous: list[tuple[list[Item], list[Item]]] = field(default_factory=list)
    conflicts: list[tuple[Layer, Layer]] = field(default_factory=list)
    ours: list[Layer] = field(default_factory=list)
    theirs: list[Layer] = field(default_factory=list)
    orders: Orders = field(default_factory=dict)
    doubt: bool = False

    @property
    def complete(self) -> bool:
        """Whether every layer has its partner."""
        return not (self.ambiguous or self.conflicts or self.ours or self.theirs)


def match(
    ours: Group, theirs: Group, signature: Signature = exact, orders: Orders | None = None
) -> Matching:
    """Return the layers of two trees that belong together.

    Children with the same layers inside belong together; where several have, their names decide,
    then their numbers, then their order. A module with no counterpart is replaced by its children.
    """
    found = Matching(orders=orders or {}, doubt=orders is not None)
    _match(ours, theirs, signature, found)
    return found


def names_in_all_layers(items: Sequence[Item]) -> tuple[str, ...]:
    """Return the names of items without the numbers of the layers that they are in.

    Example:
        >>> from flax_attn.convert.match.tree import Group
        >>> names_in_all_layers([Group(("layers", "3", "norm_a"), [])])
        ('layers.#.norm_a',)
    """
    return tuple(re.sub(r"\d+", "#", ".".join(item.path)) for item in items)


def _match(ours: Group, theirs: Group, signature: Signature, found: Matching) -> None:
    level = _Level(ours, theirs, signature)
    level.open_up()
    for left, right in level.alike():
        # Of more on one side, names alone tell which are left over.
        if len(left) != len(right):
            left, right = level.by_full_name(left, right, found)
        for pair in level.settle(left, right, found):
            level.accept(*pair, found)


class _Children:
    """The children of one of two modules that belong together."""

    def __init__(self, group: Group, signature: Signature):
        self.items: list[Item] = list(group.children)
        self.ordered, self.depth = group.ordered, len(group.path)
        self.signature = signature
        # What an item holds is asked for again and again.
        self._contents: dict[int, Hashable] = {}

    def contents(self, item: Item) -> Hashable:
        """Return what an item holds, wherever inside."""
        if id(item) not in self._contents:
            own = sorted(repr(self.signature(layer)) for layer in layers_of(item))
            self._contents[id(item)] = own[0] if len(own) == 1 else tuple(own)
        return self._contents[id(item)]

    def open(self, contents: Hashable) -> None:
        """Replace the modules that hold this by their children."""
        opened = []
        for item in self.items:
            if isinstance(item, Group) and self.contents(item) == contents:
                self.ordered = self.ordered and item.ordered
                opened += item.children
            else:
                opened.append(item)
        self.items = opened

    def order(self, parameters: bool) -> list[Hashable]:
        """Return what modules, or parameters, hold, in order."""
        return [self.contents(item) for item in self.items if _is_parameter(item) == parameters]

    def paths(self, items: list[Item]) -> list[tuple[str, ...]]:
        return [item.path[self.depth :] for item in items]

    def key(self, item: Item) -> Key:
        return key_of(item.path[self.depth :])

    def named(self, names: set[Key], items: list[Item]) -> list[Item]:
        return [item for item in items if self.key(item) in names]

    def layers_without(self, names: set[Key], items: list[Item]) -> list[Layer]:
        others = [item for item in items if self.key(item) not in names]
        return list(chain.from_iterable(map(layers_of, others)))

    def namesake(self, key: Key, family: str) -> bool:
        """Whether a layer of the family has this name; one with numbers names no layer alone."""
        if not key.words or key.numbers:
            return False
        alike = [item for item in self.items if isinstance(item, Layer) and item.family == family]
        return any(self.key(layer) == key for layer in alike)


class _Level:
    """The children of two modules that belong together."""

    def __init__(self, ours: Group, theirs: Group, signature: Signature):
        self.ours, self.theirs = _Children(ours, signature), _Children(theirs, signature)
        self.signature = signature

    def open_up(self) -> None:
        """Replace modules without a counterpart by their children, the largest first."""
        groups = self._without_counterpart()
        while groups:
            contents = self.ours.contents(max(groups, key=_count))
            self.ours.open(contents)
            self.theirs.open(contents)
            groups = self._without_counterpart()

    def _without_counterpart(self) -> list[Group]:
        # More of ours than of theirs that hold the same, or fewer.
        counts = Counter(map(self.ours.contents, self.ours.items))
        counts.subtract(map(self.theirs.contents, self.theirs.items))
        items = self.ours.items + self.theirs.items
        groups = [item for item in items if isinstance(item, Group)]
        return [group for group in groups if counts[self.ours.contents(group)]]

    def alike(self) -> Iterable[tuple[list[Item], list[Item]]]:
        """Return the items of both sides that hold the same, together."""
        alike: dict[Hashable, tuple[list[Item], list[Item]]] = defaultdict(lambda: ([], []))
        for item in self.ours.items:
            alike[self.ours.contents(item)][0].append(item)
        for item in self.theirs.items:
            alike[self.theirs.contents(item)][1].append(item)
        return alike.values()

    def by_full_name(
        self, left: list[Item], right: list[Item], found: Matching
    ) -> tuple[list[Item], list[Item]]:
        """Return those that have the same name on both sides; the others are without a partner."""
        names = set(map(self.ours.key, left)) & set(map(self.theirs.key, right))
        found.ours += self.ours.layers_without(names, left)
        found.theirs += self.theirs.layers_without(names, right)
        return self.ours.named(names, left), self.theirs.named(names, right)

    def settle(self, left: list[Item], right: list[Item], found: Matching) -> list[Settled]:
        """Return which of some like items belong together; where that cannot be told, note it."""
        settled = self._settled(left, right, found)
        if settled is None:
            found.ambiguous.append((left, right))
            return []
        return settled

    def _settled(self, left: list[Item], right: list[Item], found: Matching) -> Pairs:
        if not left:
            return []
        count = len(left)
        if count == len(right) == 1:
            (one,), (other,) = left, right
            return [self._alone(one, other)]
        name = names_in_all_layers(left)
        chosen = found.orders.get(name)
        if chosen is not None:
            return _in_order(chosen, left, right)
        settled = self._told_apart(left, right)
        doubtful = found.doubt and _is_doubtful(settled)
        return None if doubtful else settled

    def _told_apart(self, left: list[Item], right: list[Item]) -> Pairs:
        """Return what the surest way says that says anything."""
        for way in self._ways(left, right):
            settled = way(left, right)
            if settled is not None:
                return settled
        return None

    def _ways(self, left: list[Item], right: list[Item]) -> list[Way]:
        """Return the ways to tell some like items apart, the surest first."""
        # Query, key and value are never told apart by a number or by order only.
        if not self._hold_inputs(left, right):
            sure = [self._by_name, self._by_own_name, self._by_what_is_left, self._by_words]
            return [*sure, self._by_number, self._by_order]
        return (
            [self._by_name, self._by_number] if self._have_words(left, right) else [self._by_name]
        )

    def _alone(self, one: Item, other: Item) -> Settled:
        key = self.ours.key(one)
        named = key.words and key == self.theirs.key(other)
        return one, other, "name" if named else "shape"

    def _by_name(self, left: list[Item], right: list[Item]) -> list[Settled] | None:
        here, there = self.ours.paths(left), self.theirs.paths(right)
        ordered = in_order(here, there), in_order(there, here)
        # Whole paths come first: they are stricter than what tells items apart.
        for ours, theirs in ((here, there), ordered, self._keys(left, right)):
            if set(ours) == set(theirs) and len(set(ours)) == len(left):
                return _joined(left, ours, right, theirs, "name")
        return None

    def _by_own_name(self, left: list[Item], right: list[Item]) -> list[Settled] | None:
        """Return the pairs of parameters of the same names, in whatever modules they are."""
        if not all(map(_is_parameter, [*left, *right])):
            return None
        ours, theirs = _own_names(left), _own_names(right)
        if set(ours) != set(theirs) or len(set(ours)) < len(left):
            return None
        return _joined(left, ours, right, theirs, "name")

    def _by_what_is_left(self, left: list[Item], right: list[Item]) -> list[Settled] | None:
        here, there = self.ours.paths(left), self.theirs.paths(right)
        ours, theirs = in_order(here, there), in_order(there, here)
        # Numbers alone may count from another one.
        if any("".join(key).isdigit() for key in chain(ours, theirs)):
            return None
        return _all_but_one(left, ours, right, theirs)

    def _by_words(self, left: list[Item], right: list[Item]) -> list[Settled] | None:
        """Return the pairs of those that have most in common, of what has no order anywhere."""
        if self.ours.ordered or self.theirs.ordered:
            return None
        nearest = _nearest_names(*self._keys(left, right))
        if nearest is None:
            return None
        return _joined(left, nearest, right, range(len(right)), "name")

    def _by_number(self, left: list[Item], right: list[Item]) -> list[Settled] | None:
        """Return the pairs of those that have the same words, in the order of their numbers."""
        keys = self._keys(left, right)
        ours, theirs = map(_numbered, keys)
        if ours is None or theirs is None or set(ours) != set(theirs):
            return None
        return _joined(left, ours, right, theirs, "number")

    def _by_order(self, left: list[Item], right: list[Item]) -> list[Settled] | None:
        parameters = _is_parameter(left[0])
        same = self.ours.order(parameters) == self.theirs.order(parameters)
        ordered = same and self.ours.ordered and self.theirs.ordered
        if not ordered or not _agree_with_order(*self._keys(left, right)):
            return None
        return [(*pair, "order") for pair in zip(left, right, strict=True)]

    def _keys(self, left: list[Item], right: list[Item]) -> tuple[list[Key], list[Key]]:
        return distinguishing(self.ours.paths(left)), distinguishing(self.theirs.paths(right))

    def _have_words(self, left: list[Item], right: list[Item]) -> bool:
        """Whether each has words that not all of them have."""
        return all(key.words for key in chain(*self._keys(left, right)))

    def _hold_inputs(self, left: list[Item], right: list[Item]) -> bool:
        """Whether an item is the query, key or value of attention."""
        paths = self.ours.paths(left) + self.theirs.paths(right)
        return any(ATTENTION_INPUTS.intersection(key_of(path).words) for path in paths)

    def accept(self, one: Item, other: Item, evidence: Evidence, found: Matching) -> None:
        """Note two items that belong together, unless their names or kinds say otherwise."""
        if isinstance(one, Group) and isinstance(other, Group):
            _match(one, other, self.signature, found)
        elif isinstance(one, Layer) and isinstance(other, Layer):
            self._pair(one, other, evidence, found)

    def _pair(self, one: Layer, other: Layer, evidence: Evidence, found: Matching) -> None:
        named = evidence == "name"
        if one.fits(other) and (named or not self._contradicted(one, other)):
            found.pairs.append((one, other, evidence))
        else:
            found.conflicts.append((one, other))

    def _contradicted(self, one: Layer, other: Layer) -> bool:
        """Return whether the names say that the two layers do not belong together.

        Either has the name of another layer of its kind, or they are different inputs of attention.
        """
        ours, theirs = self.ours.key(one), self.theirs.key(other)
        if _other_inputs(ours, theirs):
            return True
        if ours == theirs:
            return False
        return self.theirs.namesake(ours, one.family) or self.ours.namesake(theirs, other.family)


def _count(item: Item) -> int:
    return sum(1 for _ in layers_of(item))


def _other_inputs(ours: Key, theirs: Key) -> bool:
    """Whether the names are those of different inputs of attention."""
    inputs = [ATTENTION_INPUTS.intersection(key.words) for key in (ours, theirs)]
    return all(inputs) and inputs[0] != inputs[1]


def _in_order(chosen: Sequence[int], left: list[Item], right: list[Item]) -> list[Settled]:
    partners = [right[at] for at in chosen]
    return [(*pair, "outputs") for pair in zip(left, partners, strict=True)]


def _is_doubtful(settled: Pairs) -> bool:
    """Whether nothing but their order tells a few items apart."""
    if settled is None:
        return False
    evidence = {evidence for *_, evidence in settled}
    return "order" in evidence and len(settled) <= MOST_ITEMS


def _joined(
    left: list[Item], ours: Keys, right: list[Item], theirs: Keys, evidence: Evidence
) -> list[Settled]:
    """Return the items of both sides that have the same key."""
    partner = dict(zip(theirs, right, strict=True))
    return [(item, partner[key], evidence) for item, key in zip(left, ours, strict=True)]


def _all_but_one(left: list[Item], ours: Keys, right: list[Item], theirs: Keys) -> Pairs:
    """Return the pairs of those that have the same key, and of the one that is left on each side.

    One of two modules may hold a layer that the other has in its first block.
    """
    here = dict(zip(ours, left, strict=True))
    there = dict(zip(theirs, right, strict=True))
    shared = [key for key in here if key in there]
    count = len(left)
    # With the same name twice, or two that are left, names say too little.
    if len(here) != count or len(there) != count:
        return None
    if count < 3 or len(shared) != count - 1:
        return None
    pairs = []
    for key in shared:
        one = here.pop(key)
        other = there.pop(key)
        pairs.append((one, other, "name"))
    (one,) = here.values()
    (other,) = there.values()
    pairs.append((one, other, "shape"))
    return pairs


def _is_parameter(item: Item) -> bool:
    return isinstance(item, Layer) and "value" in item.parts


def _own_names(items: list[Item]) -> list[Key]:
    return [key_of(item.path[-1:]) for item in items]


def _nearest_names(ours: list[Key], theirs: list[Key]) -> list[int] | None:
    """Return which of theirs has most in common with each of ours; None where one is not told."""
    nearest = list(chain.from_iterable(_most_alike(key, theirs) for key in ours))
    return nearest if sorted(nearest) == list(range(len(theirs))) else None


def _most_alike(key: Key, others: list[Key]) -> list[int]:
    """Return which of some names have most in common with another one; none if none has any."""
    shared = [_shared(key, other) for other in others]
    most = max(shared)
    return [at for at, count in enumerate(shared) if most and count == most]


def _shared(key: Key, other: Key) -> int:
    """Return how many words two names have in common; the same numbers count as one."""
    words = set(key.words).intersection(other.words)
    same_numbers = bool(key.numbers) and key.numbers == other.numbers
    return len(words) + same_numbers


def _numbered(keys: list[Key]) -> list[tuple[tuple[str, ...], int]] | None:
    """Return the words of each, and its place by number among those with the same words.

    None where some with the same words are not numbered alike.
    """
    places = []
    for key in keys:
        alike = [other for other in keys if other.words == key.words]
        ranks = _ranks(alike)
        if ranks is None:
            return None
        places.append((key.words, ranks[alike.index(key)]))
    return places


def _ranks(keys: list[Key]) -> list[int] | None:
    """Return the place of each by its numbers, or None if they are not numbered alike."""
    numbers = [key.numbers for key in keys]
    lengths = {len(own) for own in numbers}
    repeated = len(set(numbers)) < len(keys)
    if repeated or len(lengths) > 1:
        return None
    return [sorted(numbers).index(own) for own in numbers]


def _agree_with_order(ours: list[Key], theirs: list[Key]) -> bool:
    """Whether neither names nor numbers contradict the order."""
    count_up = _count_up(ours) and _count_up(theirs)
    # A word that both sides have is at the same places, whatever else the names say.
    here, there = _places_of_words(ours), _places_of_words(theirs)
    shared = [word for word in here if word in there]
    return count_up and all(here[word] == there[word] for word in shared)


def _count_up(keys: list[Key]) -> bool:
    ranks = _ranks(keys)
    return ranks is None or ranks == sorted(ranks)


def _places_of_words(keys: list[Key]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for at, key in enumerate(keys):
        whole = [repr(key)] if key.words else []
        for word in (*key.words, *whole):
            places.setdefault(word, []).append(at)
    return places
