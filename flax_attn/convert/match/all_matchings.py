"""Every matching of two trees of layers, where names leave several."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from flax_attn.convert.match.matcher import (
    MOST_ITEMS,
    Item,
    Matching,
    Orders,
    exact,
    match,
    names_in_all_layers,
)
from flax_attn.convert.match.names import ATTENTION_INPUTS, key_of
from flax_attn.convert.match.tree import Group

# The most matchings: each is tried.
MOST = 24


def all_matchings(ours: Group, theirs: Group) -> list[Matching]:
    """Return every complete matching, those in the order of definition first.

    That order decides nothing here. Repeated layers match alike. It is none where a layer has no
    partner at all, where query, key and value are not told apart, or where there are more than are
    tried.
    """
    complete = []
    waiting: list[Orders] = [{}]
    while waiting:
        orders = waiting.pop()
        found = match(ours, theirs, exact, orders)
        if found.complete:
            complete.append(found)
            continue
        # Names contradict this choice, and say nothing of the others.
        if found.conflicts and orders:
            continue
        further = _further(orders, found)
        # The last is taken next.
        waiting += reversed(further)
        count = len(waiting) + len(complete)
        if not further or count > MOST:
            return []
    return complete


def _further(orders: Orders, found: Matching) -> list[Orders]:
    """Return the choices so far with each order of the first items that have several."""
    if found.ours or found.theirs or found.conflicts:
        return []
    left, right = found.ambiguous[0]
    count = len(left)
    items = [*left, *right]
    if count > MOST_ITEMS or _are_inputs_of_attention(items):
        return []
    name = names_in_all_layers(left)
    further = []
    places = range(count)
    for order in permutations(places):
        chosen = {**orders, name: order}
        further.append(chosen)
    return further


def _are_inputs_of_attention(items: Sequence[Item]) -> bool:
    """Whether an item is the query, key or value of attention: swapping these is a fault."""
    return any(ATTENTION_INPUTS.intersection(key_of(item.path).words) for item in items)
