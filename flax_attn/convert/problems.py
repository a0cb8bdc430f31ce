"""What does not fit between a layout and the entries of a state dict, a line for each."""

import re
from collections.abc import Callable, Mapping
from itertools import chain

from attn_spec.checks import nearest
from flax_attn.convert.entry import Entry
from flax_attn.convert.rules import Layout, Shape

Shapes = Mapping[str, Shape]
# The lines of each kind of problem; what is left out is counted.
_LINES = 100


def problems(entries: list[Entry], theirs: Shapes, layout: Layout, given: str = "") -> list[str]:
    """Return a line for each missing, mis-shaped or unexpected entry, at most a hundred of each.

    The names in `theirs` are those behind the prefix that was given.
    """
    wanted = dict(chain.from_iterable(entry.tensors.items() for entry in entries))
    prefix = _common_prefix(wanted, theirs)
    # A name that is there as it is shows that the prefix is right.
    if prefix and wanted.keys().isdisjoint(theirs):
        return [_with_prefix(given + prefix)]
    got = {name: tuple(shape) for name, shape in theirs.items()}
    return _differences(wanted, got, re.compile(layout.ignored))


def _with_prefix(prefix: str) -> str:
    return f"every name has the prefix {prefix!r}: pass prefix={prefix!r}"


def _differences(wanted: Shapes, got: Shapes, ignored: re.Pattern[str]) -> list[str]:
    missing = [name for name in wanted if name not in got]
    extra = [name for name in got if name not in wanted and not ignored.fullmatch(name)]
    lines = _unpaired("missing", missing, wanted, extra) + _misshapen(wanted, got)
    return lines + _unpaired("unexpected", extra, got, missing)


def _misshapen(wanted: Shapes, got: Shapes) -> list[str]:
    wrong = [name for name in wanted if name in got and got[name] != wanted[name]]
    return _listed("mis-shaped", wrong, lambda name: f": expected {wanted[name]}, got {got[name]}")


def _unpaired(kind: str, names: list[str], shapes: Shapes, others: list[str]) -> list[str]:
    # The search for like names is quadratic: it sees the names that are shown.
    shown = others[:_LINES]
    return _listed(kind, names, lambda name: f" {shapes[name]}{nearest(name, shown)}")


def _listed(kind: str, names: list[str], detail: Callable[[str], str]) -> list[str]:
    lines = [f"{kind} {name}{detail(name)}" for name in names[:_LINES]]
    left = len(names) - _LINES
    if left > 0:
        lines.append(f"{kind}: {left} more")
    return lines


def _common_prefix(wanted: Shapes, theirs: Shapes) -> str:
    """Return the prefix under which every name is there, "" if there is none."""
    first = next(iter(wanted), "")
    ends = [name for name in theirs if first and name.endswith("." + first)]
    for prefix in (name.removesuffix(first) for name in ends):
        if all(prefix + name in theirs for name in wanted):
            return prefix
    return ""
