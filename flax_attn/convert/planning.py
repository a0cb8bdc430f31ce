"""Which rule of a layout makes which entry, planned in full before anything is moved."""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from flax_attn.convert.entry import Entry
from flax_attn.convert.rules import Axes, ConversionError, Layout, Rule, Shape


def no_axes(prefix: str) -> Mapping[str, int]:
    """Give no sizes: the shapes give them all."""
    return {}


def plan(
    shapes: Mapping[str, Shape],
    layout: Layout,
    axes: Axes = no_axes,
    statistics: Collection[str] = (),
) -> list[Entry]:
    """Return one entry for each name of the layout, every parameter belonging to exactly one.

    Args:
        shapes: shapes of our parameters, by name.
        layout: layout that stores them.
        axes: the sizes of einops axes within a prefix, such as `{"h": 64}` at `"block.att."` for
            `"i (n h) -> i n h"`; those that are alone on the left of a pattern are read from the
            shape.
        statistics: the names among `shapes` that are running statistics.

    Raises:
        ConversionError: if the layout has no place for a parameter, or one entry for two.
    """
    entries, free = apply_rules(shapes, layout.rules, axes)
    if free:
        homeless = ", ".join(f"{name} {shape}" for name, shape in free.items())
        raise ConversionError(
            f"this layout has no place for {homeless}. Rules for some of the parameters go to"
            " convert.auto(flax_module, torch_module, rules=...), which pairs the rest"
        )
    _check_distinct(entries)
    # Running statistics are loaded and stored, and have no gradient.
    fixed = set(statistics)
    return [replace(entry, trainable=not fixed.issuperset(entry.ours)) for entry in entries]


def apply_rules(
    shapes: Mapping[str, Shape], rules: Sequence[Rule], axes: Axes = no_axes
) -> tuple[list[Entry], dict[str, Shape]]:
    """Return the entries that rules make, and the parameters that they leave."""
    entries, free = [], dict(shapes)
    for rule in rules:
        for name in list(free):
            # A rule may have taken the name with another already.
            entry = _apply(rule, name, free, shapes, axes)
            if entry is None or not entry.fits_together():
                continue
            entries.append(entry)
            for own in set(entry.ours):
                del free[own]
    return entries, free


def _apply(
    rule: Rule, name: str, free: Mapping[str, Shape], every: Mapping[str, Shape], axes: Axes
) -> Entry | None:
    found = _expression(rule.ours[0]).fullmatch(name)
    if found is None:
        return None
    prefix = found[1] or ""
    parts = found.groupdict()
    ours = tuple(prefix + own.format(**parts) for own in rule.ours)
    if any(own not in free for own in ours):
        return None
    # What a rule asks for beside its own may belong to another rule already.
    beside = prefix + rule.beside.format(**parts)
    if rule.beside and beside not in every:
        return None
    theirs = prefix + rule.theirs.format(**parts)
    shapes = tuple(free[own] for own in ours)
    return Entry(rule, ours, theirs, shapes, {**_enclosing(name, axes), **dict(rule.sizes)})


def _enclosing(name: str, axes: Axes) -> dict[str, int]:
    """Return the sizes given at the prefixes of a name; those of a longer prefix count more."""
    parts = [f"{part}." for part in name.split(".")]
    sizes = {}
    # The first prefix is empty, and the name itself is none.
    for i in range(len(parts)):
        sizes |= axes("".join(parts[:i]))
    return sizes


@lru_cache
def _expression(name: str) -> re.Pattern[str]:
    """Return the regular expression of a name: any prefix, the name, one part per placeholder."""
    # re.escape has put a backslash before each brace.
    parts = re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^.]+)", re.escape(name))
    return re.compile(r"(.*\.)?" + parts)


def _check_distinct(entries: list[Entry]) -> None:
    twice = {name: ours for name, ours in _makers(entries).items() if len(ours) > 1}
    if twice:
        clashes = "; ".join(f"{name} of {', and of '.join(ours)}" for name, ours in twice.items())
        raise ConversionError(
            f"an entry is made once; this layout makes {clashes}. Rename one in a Layout"
        )


def _makers(entries: list[Entry]) -> dict[str, list[str]]:
    """Return the parameters that make each entry, one text for each time it is made."""
    makers = defaultdict(list)
    for entry in entries:
        for name in entry.names:
            makers[name].append(" and ".join(entry.ours))
    return makers
