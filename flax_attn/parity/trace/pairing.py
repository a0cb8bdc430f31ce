"""Which submodule of one side is which of the other, from the pairs of their parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from flax_attn.convert.entry import Entry

# The whole module, together with the function that calls it.
ROOT = "."
# The positions of the entries whose parameters a module holds.
Held = frozenset[int]


def pair_paths(
    entries: Sequence[Entry], flax: Iterable[str], torch: Iterable[str]
) -> dict[str, str]:
    """Return the PyTorch path of every Flax submodule that has a counterpart.

    Two modules are counterparts if they hold exactly the same parameters: where several projections
    of Flax are one of PyTorch, only their parents pair. Modules without parameters pair by equal
    paths under counterparts.

    Args:
        entries: the pairs of parameters; where there are none, modules pair by equal paths.
        flax: paths of the submodules of the Flax side that can be called.
        torch: paths of the submodules of the PyTorch side that can be called.

    Example:
        >>> from flax_attn.convert import LAYOUTS
        >>> from flax_attn.convert.planning import plan
        >>> entries = plan({"fc.kernel": (3, 4), "fc.bias": (4,)}, LAYOUTS["torch"])
        >>> pair_paths(entries, ["fc", "act"], ["fc", "act", "drop"])
        {'.': '.', 'fc': 'fc', 'act': 'act'}
    """
    ours, theirs = list(flax), list(torch)
    if not entries:
        return {ROOT: ROOT} | {path: path for path in ours if path in theirs}
    our_groups = _groups(ours, [entry.ours for entry in entries])
    their_groups = _groups(theirs, [(entry.theirs,) for entry in entries])
    # What holds nothing has no place of its own, and stands where its parent stands.
    our_free = our_groups.pop(frozenset(), [])
    their_free = set(their_groups.pop(frozenset(), []))
    pairs = {ROOT: ROOT}
    for held, chain in our_groups.items():
        pairs |= _matched(chain, their_groups.get(held, []))
    for path in our_free:
        there = _moved(path, pairs)
        if there in their_free:
            pairs[path] = there
    return pairs


def _groups(paths: Iterable[str], names: Sequence[Sequence[str]]) -> dict[Held, list[str]]:
    """Return the paths by the entries that lie under them, without those that cut one in two."""
    groups = defaultdict(list)
    for path in paths:
        held = _held(path, names)
        if held is not None:
            groups[held].append(path)
    return groups


def _held(path: str, names: Sequence[Sequence[str]]) -> Held | None:
    """Return which entries lie under a path; None if one is only partly there."""
    held = []
    prefix = f"{path}."
    for i, parts in enumerate(names):
        inside = [name.startswith(prefix) for name in parts]
        if all(inside):
            held.append(i)
        elif any(inside):
            return None
    return frozenset(held)


def _matched(ours: list[str], theirs: list[str]) -> dict[str, str]:
    # A module within a module may hold the same weights: equal names first, then from the inside
    # out.
    pairs = {path: path for path in ours if path in theirs}
    left = [path for path in ours if path not in pairs]
    right = [path for path in theirs if path not in pairs]
    left.sort(key=len, reverse=True)
    right.sort(key=len, reverse=True)
    return pairs | dict(zip(left, right, strict=False))


def _moved(path: str, pairs: dict[str, str]) -> str:
    parts = path.split(".")
    for i in range(len(parts) - 1, 0, -1):
        parent = ".".join(parts[:i])
        if parent in pairs:
            return ".".join([pairs[parent], *parts[i:]])
    return path
