"""Which of several pairings of parameters makes two modules equal, where names do not tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flax_attn import convert
from flax_attn.convert.entry import Entry
from flax_attn.convert.match.pairing import Pairing
from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import AdapterError, NotRun, RunSpec
from flax_attn.parity.float32 import largest_error
from flax_attn.parity.listed import listed
from flax_attn.parity.pair import Pair

Candidate = tuple[convert.Layout | None, Sequence[Entry]]
# The pairs that a report names.
SHOWN = 4


def pair_by_outputs(pair: Pair, candidates: Sequence[Candidate]) -> None:
    """Give a pair the pairing with which the outputs agree best, and say that names did not tell.

    With random weights that of a right port agrees, and no other one does. Where none agrees, the
    two differ however they are paired, and that with which most values agree is taken.
    """
    errors = []
    for candidate in candidates:
        errors.append(_error(pair, *candidate))
        # Random weights agree to the last bits by no accident.
        if errors[-1] <= tolerance.FORWARD:
            break
    best = int(np.argmin(errors))
    agrees = _agree(errors[best])
    if not agrees:
        best = _nearest(pair, candidates)
    layout, entries = candidates[best]
    _take(pair, layout, entries)
    if agrees:
        pair.untested += _reversed(layout, candidates[0][0])
    doubtful = _doubtful(layout, [other for other, _ in candidates])
    # Whether a square matrix is transposed is told by the outputs for certain.
    if agrees and not doubtful:
        return
    pairs = listed(doubtful or _doubtful_turns(layout), SHOWN, between="; ")
    count = len(candidates)
    found = "with this one the outputs agree"
    if not agrees:
        found = "the outputs agree with none of them"
    sentence = f"whether {pairs} are pairs: names allow {count} pairings, and {found}."
    remedy = "Name them alike, or pair them by rules"
    pair.untested.append(f"{sentence} {remedy}")


def settled_by_order(pair: Pair) -> bool:
    """Whether parameters were paired by their order, and the outputs do not agree."""
    rows = pair.layout.rows if isinstance(pair.layout, Pairing) else ()
    if not any(row.evidence == "order" for row in rows):
        return False
    # Other checks have the results of this run as well.
    return not _agree(_error_of(pair, pair.uncompiled))


def _agree(error: float) -> bool:
    """Whether outputs agree up to the roundings of float32, which are judged later."""
    return error <= tolerance.REORDERED_FLOAT32


def _take(pair: Pair, layout: convert.Layout | None, entries: Sequence[Entry]) -> None:
    flax: Any = pair.flax
    pair.layout, pair.entries = layout, entries
    flax.share(entries)
    flax.load(pair.weights)
    pair.forget("flax")


def _error(pair: Pair, layout: convert.Layout | None, entries: Sequence[Entry]) -> float:
    """Return the largest error of an output with this pairing."""
    _take(pair, layout, entries)
    return _error_of(pair, pair.run_spec("paired"))


def _error_of(pair: Pair, spec: RunSpec) -> float:
    """Return the largest error of an output in a run of JAX; infinite where a call raises."""
    try:
        ours = pair.run("flax", spec).outputs
        error = largest_error(ours, pair.plain.outputs)
    # What it raises is told where the module is called.
    except (AdapterError, NotRun):
        return np.inf
    return np.inf if error is None else error


def _nearest(pair: Pair, candidates: Sequence[Candidate]) -> int:
    """Return the first pairing with which JAX has most of the values that PyTorch computes."""
    from flax_attn.parity.trace import runs
    from flax_attn.parity.trace.align import Alignment

    counts = []
    # Other people's modules may fail in any way, and are compared with the first pairing then.
    try:
        torch = runs.torch_forward(pair)
        expected = {name: node.value for name, node in torch.outputs.items()}
        for candidate in candidates:
            _take(pair, *candidate)
            _, flax = runs.flax_forward(pair)
            counts.append(len(Alignment(flax, torch, expected).flax_of))
    except Exception:
        return 0
    return int(np.argmax(counts))


def _reversed(layout: convert.Layout | None, first: convert.Layout | None) -> list[str]:
    """Return a sentence for each tensor that holds several in another order than its name says."""
    if not isinstance(layout, Pairing) or not isinstance(first, Pairing):
        return []
    usual = {_parts_of(row.rule) for row in first.rows}
    several = [row.rule for row in layout.rows if len(_parts_of(row.rule)) > 1]
    return [_order_of(rule) for rule in several if _parts_of(rule)[::-1] in usual]


def _parts_of(rule: convert.Rule) -> tuple[str, ...]:
    """Return the names of what one side holds in one tensor, in its order."""
    return rule.names or rule.ours


def _order_of(rule: convert.Rule) -> str:
    whole = rule.ours[0] if rule.names else rule.theirs
    return (
        f"{whole} makes the outputs agree if it holds {', then '.join(_parts_of(rule))}, which is"
        " not what its name says. Exchange them, or pair them by rules"
    )


def _doubtful(layout: convert.Layout | None, layouts: Sequence[convert.Layout | None]) -> list[str]:
    """Return the pairs of a layout that not all of some layouts have."""
    others = list(map(_partners, layouts))
    doubtful = []
    for name, ours in _partners(layout).items():
        if any(other.get(name) != ours for other in others):
            doubtful.append(f"{min(ours)} and {name}")
    return doubtful


def _partners(layout: convert.Layout | None) -> dict[str, set[str]]:
    rows = layout.rows if isinstance(layout, Pairing) else ()
    # In which order one side holds several is told by the outputs.
    return {row.theirs: set(row.ours) for row in rows}


def _doubtful_turns(layout: convert.Layout | None) -> list[str]:
    """Return the pairs of square matrices, either of which may be the other transposed."""
    rows = layout.rows if isinstance(layout, Pairing) else ()
    return [f"{row.ours[0]} and {row.theirs}" for row in rows if row.evidence == "outputs"]
