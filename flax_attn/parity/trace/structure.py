"""Shapes of activations: find other numbers of heads, and axes that can be read in two ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace.activations import Activations, record
from flax_attn.parity.trace.alignment import STEPS, step_of
from flax_attn.parity.trace.hooks import path_of, spoken

UNKNOWN = "none of the known formulas"


def head_causes(found: Activations) -> list[str]:
    """Return a sentence for every module whose scores have another number of heads on either side.

    Parameters have the same shapes then: a width of 12 is 2 heads of 6, or 3 of 4.
    """
    counts = {
        path_of(name): _heads(found, name, *shapes) for name, shapes in found.differing.items()
    }
    return [
        f"{spoken(path)}: flax has {c[0]} heads, torch has {c[1]}"
        for path, c in counts.items()
        if c
    ]


def _heads(
    found: Activations, name: str, flax: Sequence[int], torch: Sequence[int]
) -> tuple[int, int] | None:
    if (
        step_of(name) not in STEPS
        or min(len(flax), len(torch)) < 3
        or tuple(flax[-2:]) != tuple(torch[-2:])
    ):
        return None
    batch = torch[0] if len(torch) == 4 else _batch(found)
    counts = [divmod(int(np.prod(shape[:-2])), batch) for shape in (flax, torch)]
    whole = all(not rest and heads for heads, rest in counts)
    return (counts[0][0], counts[1][0]) if whole and counts[0] != counts[1] else None


def _batch(found: Activations) -> int:
    return next((len(x) for node in found.theirs.values() for x in node.inputs if x.ndim), 1)


def without_what_follows(causes: Sequence[str], heads: Sequence[str]) -> list[str]:
    """Return causes, without unknown ones inside a module with another number of heads.

    Example:
        >>> heads = ["att: flax has 2 heads, torch has 4"]
        >>> unknown = "att, input of out: flax has none of the known formulas"
        >>> without_what_follows([unknown, "fc: a cause"], heads)
        ['fc: a cause']
    """
    places = tuple(f"{head.partition(':')[0]}{mark}" for head in heads for mark in (",", "/", ":"))
    return [c for c in causes if not (heads and c.startswith(places) and UNKNOWN in c)]


def in_another_batch(pair: Pair, found: Activations) -> tuple[Pair, Activations]:
    """Return the pair and its activations, with one more example if batch and heads are ambiguous.

    Where there are as many examples as heads, the axes of scores can be read in two ways. If the
    sides agree in one of these, it is the right one. If they do not, another batch says which it
    is.
    """
    if not found.ambiguous:
        return pair, found
    size = len(found.torch[found.ambiguous[0]])
    try:
        other = pair.with_inputs(_longer(pair.inputs, size), _longer(pair.extras, size))
        again = record(other)
    except Exception:  # a module that takes one batch alone is located in it
        return pair, found
    return other, again


def _longer(arrays: Mapping[str, np.ndarray], size: int) -> Arrays:
    """Return arrays with their first example once more at the end, if they have this many."""
    return {
        name: np.concatenate([x, x[:1]]) if x.ndim and len(x) == size else x
        for name, x in arrays.items()
    }
