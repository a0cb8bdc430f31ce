"""What does not fit between a layout and the entries of a state dict, a line for each."""

import difflib
import re
from collections.abc import Mapping

from flax_attn.convert.rules import Entry, Layout, Shape

_LINES = 100  # of each kind of problem; what is left out is counted


def problems(entries: list[Entry], theirs: Mapping[str, Shape], layout: Layout) -> list[str]:
    """Return a line for each missing, mis-shaped or unexpected entry, at most a hundred of each."""
    wanted = {name: shape for entry in entries for name, shape in entry.tensors.items()}
    extra = [
        name for name in theirs if name not in wanted and not re.fullmatch(layout.ignored, name)
    ]
    missing = [name for name in wanted if name not in theirs]
    if missing == list(wanted) and (prefix := _common_prefix(wanted, theirs)):
        return [f"every name has the prefix {prefix!r}: pass prefix={prefix!r}"]
    near, far = missing[:_LINES], extra[:_LINES]
    lines = [f"missing {name} {wanted[name]}{_nearest(name, far)}" for name in near]
    lines += _more("missing", missing)
    shapes = {name: tuple(theirs[name]) for name in wanted if name in theirs}
    wrong = [name for name, shape in shapes.items() if shape != wanted[name]]
    lines += [f"mis-shaped {n}: expected {wanted[n]}, got {shapes[n]}" for n in wrong[:_LINES]]
    lines += _more("mis-shaped", wrong)
    lines += [f"unexpected {name} {tuple(theirs[name])}{_nearest(name, near)}" for name in far]
    return lines + _more("unexpected", extra)


def _more(kind: str, names: list[str]) -> list[str]:
    left = len(names) - _LINES
    return [f"{kind}: {left} more"] if left > 0 else []


def _common_prefix(wanted: Mapping[str, Shape], theirs: Mapping[str, Shape]) -> str:
    first = next(iter(wanted), "")
    prefixes = [name.removesuffix(first) for name in theirs if first and name.endswith("." + first)]
    return next(
        (prefix for prefix in prefixes if all(prefix + name in theirs for name in wanted)), ""
    )


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f" (nearest: {near[0]})" if near else ""
