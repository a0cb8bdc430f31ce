"""Match two trees of layers by kind and shape, then by name, number and order, without a guess."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from flax_attn.convert.match.names import ATTENTION_INPUTS, Key, distinguishing, key_of
from flax_attn.convert.match.tree import Group, Layer, layers_of

Item = Layer | Group
Evidence = Literal["shape", "name", "number", "order"]
Signature = Callable[[Layer], Hashable]


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
    """

    pairs: list[tuple[Layer, Layer, Evidence]] = field(default_factory=list)
    ambiguous: list[tuple[list[Item], list[Item]]] = field(default_factory=list)
    conflicts: list[tuple[Layer, Layer]] = field(default_factory=list)
    ours: list[Layer] = field(default_factory=list)
    theirs: list[Layer] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every layer has its partner."""
        return not (self.ambiguous or self.conflicts or self.ours or self.theirs)


def match(ours: Group, theirs: Group, signature: Signature = exact) -> Matching:
    """Return the layers of two trees that belong together.

    Children with the same layers inside belong together; where several have, their names decide,
    then their numbers, then their order. A module with no counterpart is replaced by its children.
    """
    found = Matching()
    _match(ours, theirs, signature, found)
    return found


def _match(ours: Group, theirs: Group, signature: Signature, found: Matching) -> None:
    level = _Level(ours, theirs, signature)
    level.open_up()
    for left, right in level.alike():
        if len(left) != len(right):
            left, right = level.by_full_name(left, right, found)
        if not left:
            continue
        settled = level.settle(left, right)
        if settled is None:
            found.ambiguous.append((left, right))
        for one, other, evidence in settled or ():
            level.accept(one, other, evidence, found)


class _Level:
    """The children of two modules that belong together."""

    def __init__(self, ours: Group, theirs: Group, signature: Signature):
        self.ours, self.theirs, self.signature = (
            list(ours.children),
            list(theirs.children),
            signature,
        )
        self.depths = len(ours.path), len(theirs.path)
        self.ordered = ours.ordered and theirs.ordered
        self._contents: dict[int, Hashable] = {}

    def contents(self, item: Item) -> Hashable:
        """Return what an item holds, wherever inside."""
        if id(item) not in self._contents:
            own = sorted(map(repr, map(self.signature, layers_of(item))))
            self._contents[id(item)] = own[0] if len(own) == 1 else tuple(own)
        return self._contents[id(item)]

    def open_up(self) -> None:
        """Replace modules without a counterpart by their children, the largest first."""
        while True:
            counts: dict[Hashable, int] = defaultdict(int)
            for sign, items in ((1, self.ours), (-1, self.theirs)):
                for item in items:
                    counts[self.contents(item)] += sign
            groups = [
                i
                for i in (*self.ours, *self.theirs)
                if isinstance(i, Group) and counts[self.contents(i)]
            ]
            if not groups:
                return
            largest = self.contents(max(groups, key=lambda item: sum(1 for _ in layers_of(item))))
            self.ours, self.theirs = (
                self._opened(self.ours, largest),
                self._opened(self.theirs, largest),
            )

    def _opened(self, items: list[Item], contents: Hashable) -> list[Item]:
        opened: list[Item] = []
        for item in items:
            if isinstance(item, Group) and self.contents(item) == contents:
                self.ordered = self.ordered and item.ordered
                opened += item.children
            else:
                opened.append(item)
        return opened

    def alike(self) -> Iterable[tuple[list[Item], list[Item]]]:
        """Return the items of both sides that hold the same, together."""
        alike: dict[Hashable, tuple[list[Item], list[Item]]] = defaultdict(lambda: ([], []))
        for side, items in enumerate((self.ours, self.theirs)):
            for item in items:
                alike[self.contents(item)][side].append(item)
        return alike.values()

    def by_full_name(
        self, left: list[Item], right: list[Item], found: Matching
    ) -> tuple[list[Item], list[Item]]:
        """Return those that have the same name on both sides; the others are without a partner."""
        names = {self._key(item, 0) for item in left} & {self._key(item, 1) for item in right}
        found.ours += [
            x for item in left if self._key(item, 0) not in names for x in layers_of(item)
        ]
        found.theirs += [
            x for item in right if self._key(item, 1) not in names for x in layers_of(item)
        ]
        left = [item for item in left if self._key(item, 0) in names]
        right = [item for item in right if self._key(item, 1) in names]
        return left, right

    def settle(
        self, left: list[Item], right: list[Item]
    ) -> list[tuple[Item, Item, Evidence]] | None:
        """Return which of some like items belong together, or None if that cannot be told."""
        if len(left) == len(right) == 1:
            keys = self._key(left[0], 0), self._key(right[0], 1)
            return [
                (left[0], right[0], "name" if keys[0].words and keys[0] == keys[1] else "shape")
            ]
        for names in self._names(left, right):
            if all(len(set(keys)) == len(left) for keys in names) and set(names[0]) == set(
                names[1]
            ):
                partner = dict(zip(names[1], right, strict=True))
                return [
                    (item, partner[key], "name") for item, key in zip(left, names[0], strict=True)
                ]
        keys = distinguishing(self._paths(left, 0)), distinguishing(self._paths(right, 1))
        if any(
            ATTENTION_INPUTS.intersection(key_of(path).words)
            for path in self._all_paths(left, right)
        ):
            return None
        ranks = [_ranks(side) for side in keys]
        if ranks[0] is not None and ranks[1] is not None:
            partner = dict(zip(ranks[1], right, strict=True))
            return [
                (item, partner[rank], "number") for item, rank in zip(left, ranks[0], strict=True)
            ]
        if self._same_order(left, right) and _agree_with_order(keys, ranks):
            return [(*pair, "order") for pair in zip(left, right, strict=True)]
        return None

    def accept(self, one: Item, other: Item, evidence: Evidence, found: Matching) -> None:
        """Note two items that belong together, unless their names or kinds say otherwise."""
        if isinstance(one, Group) and isinstance(other, Group):
            _match(one, other, self.signature, found)
        elif isinstance(one, Layer) and isinstance(other, Layer):
            wrong = not one.fits(other) or (evidence != "name" and self._contradicted(one, other))
            if wrong:
                found.conflicts.append((one, other))
            else:
                found.pairs.append((one, other, evidence))

    def _contradicted(self, one: Layer, other: Layer) -> bool:
        """Return whether the names say that the two layers do not belong together.

        Either has the name of another layer of its kind, or they are different inputs of attention.
        """
        inputs = [
            ATTENTION_INPUTS.intersection(self._key(item, side).words)
            for side, item in enumerate((one, other))
        ]
        if all(inputs) and inputs[0] != inputs[1]:
            return True
        if self._key(one, 0) == self._key(other, 1):
            return False
        return self._has_namesake(one, 0, self.theirs) or self._has_namesake(other, 1, self.ours)

    def _has_namesake(self, item: Layer, side: int, others: Sequence[Item]) -> bool:
        key = self._key(item, side)
        if not key.words or key.numbers:
            return False
        alike = (o for o in others if isinstance(o, Layer) and o.family == item.family)
        return any(self._key(o, 1 - side) == key for o in alike)

    def _names(
        self, left: list[Item], right: list[Item]
    ) -> Iterable[tuple[Sequence[Hashable], Sequence[Hashable]]]:
        """Return names of the items to compare, the strictest first."""
        paths = self._paths(left, 0), self._paths(right, 1)
        yield paths
        yield distinguishing(paths[0]), distinguishing(paths[1])

    def _same_order(self, left: list[Item], right: list[Item]) -> bool:
        """Whether modules, or parameters, are in the same order everywhere on this level."""
        raw = _is_parameter(left[0])
        orders = [
            [self.contents(i) for i in items if _is_parameter(i) == raw]
            for items in (self.ours, self.theirs)
        ]
        return self.ordered and orders[0] == orders[1]

    def _paths(self, items: list[Item], side: int) -> list[tuple[str, ...]]:
        return [item.path[self.depths[side] :] for item in items]

    def _all_paths(self, left: list[Item], right: list[Item]) -> list[tuple[str, ...]]:
        return self._paths(left, 0) + self._paths(right, 1)

    def _key(self, item: Item, side: int) -> Key:
        return key_of(item.path[self.depths[side] :])


def _is_parameter(item: Item) -> bool:
    return isinstance(item, Layer) and "value" in item.parts


def _ranks(keys: list[Key]) -> list[int] | None:
    """Return the place of each by its numbers, or None if they are not numbered alike."""
    numbers = [key.numbers for key in keys]
    if (
        any(key.words for key in keys)
        or len(set(numbers)) < len(keys)
        or len(set(map(len, numbers))) > 1
    ):
        return None
    return [sorted(numbers).index(own) for own in numbers]


def _agree_with_order(keys: tuple[list[Key], list[Key]], ranks: Sequence[list[int] | None]) -> bool:
    """Whether neither names nor numbers contradict the order."""
    if any(rank is not None and rank != sorted(rank) for rank in ranks):
        return False
    shared = {key for key in set(keys[0]) & set(keys[1]) if key.words}
    return all(keys[0].index(key) == keys[1].index(key) for key in shared)
