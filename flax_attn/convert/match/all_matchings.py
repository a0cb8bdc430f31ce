"""Every matching of two trees of layers, where names leave several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        if found.ours or found.theirs or found.conflicts:
            return []
        left, right = found.ambiguous[0]
        if _are_inputs_of_attention([*left, *right]) or len(left) > MOST_ITEMS:
            return []
        # The last is taken next.
        waiting += reversed(list(_further(orders, left)))
        if len(waiting) + len(complete) > MOST:
            return []
    return complete


def _further(orders: Orders, items: Sequence[Item]) -> Iterator[Orders]:
    """Yield the choices so far with each order of some more items."""
    for order in permutations(range(len(items))):
        yield {**orders, names_in_all_layers(items): order}


def _are_inputs_of_attention(items: Sequence[Item]) -> bool:
    """Whether an item is the query, key or value of attention: swapping these is a fault."""
    return any(ATTENTION_INPUTS.intersection(key_of(item.path).words) for item in items)
