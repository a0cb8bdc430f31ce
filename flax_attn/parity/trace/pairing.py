"""Which submodule of one side is which of the other, from the pairs of their parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from flax_attn.convert.rules import Entry

# The whole module, together with the function that calls it.
ROOT = "."


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
    held_by_ours = {path: _held(path, [entry.ours for entry in entries]) for path in ours}
    held_by_theirs = {path: _held(path, [(entry.theirs,) for entry in entries]) for path in theirs}
    pairs = {ROOT: ROOT}
    groups = _groups(held_by_theirs)
    for held, chain in _groups(held_by_ours).items():
        pairs |= _matched(chain, groups.get(held, []))
    free = {path for path, held in held_by_theirs.items() if held == frozenset()}
    for path in (path for path, held in held_by_ours.items() if held == frozenset()):
        there = _moved(path, pairs)
        if there in free:
            pairs[path] = there
    return pairs


def _held(path: str, names: Sequence[Sequence[str]]) -> frozenset[int] | None:
    """Return which entries lie under a path; None if one is only partly there."""
    inside = [[name.startswith(f"{path}.") for name in parts] for parts in names]
    if any(any(parts) and not all(parts) for parts in inside):
        return None
    return frozenset(i for i, parts in enumerate(inside) if all(parts))


def _groups(held: dict[str, frozenset[int] | None]) -> dict[frozenset[int], list[str]]:
    groups = defaultdict(list)
    for path, entries in held.items():
        if entries:
            groups[entries].append(path)
    return groups


def _matched(ours: list[str], theirs: list[str]) -> dict[str, str]:
    # A module within a module may hold the same weights: equal names first, then from the inside
    # out.
    pairs = {path: path for path in ours if path in theirs}
    left, right = (
        [p for p in sorted(chain, key=len, reverse=True) if p not in pairs]
        for chain in (ours, theirs)
    )
    return pairs | dict(zip(left, right, strict=False))


def _moved(path: str, pairs: dict[str, str]) -> str:
    parts = path.split(".")
    for i in range(len(parts) - 1, 0, -1):
        parent = ".".join(parts[:i])
        if parent in pairs:
            return ".".join([pairs[parent], *parts[i:]])
    return path
