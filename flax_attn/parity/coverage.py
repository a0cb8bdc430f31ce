"""What a comparison exercised, and what applies and was not tested."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from flax_attn.parity.adapters.adapter import AdapterError, NothingCompared, NotRun
from flax_attn.parity.check import Check
from flax_attn.parity.checks import CHECKS
from flax_attn.parity.effects import without_effect
from flax_attn.parity.ids import tables
from flax_attn.parity.masks import mask_inputs
from flax_attn.parity.pair import LOWER, Pair
from flax_attn.parity.programs import callbacks, wider_dtypes

# What a check exercises beyond eval mode in float64.
BRANCHES = {
    "dropout": "train mode",
    "unbatched": "no batch axis",
    "cache = full": "steps with a cache",
    "padded rows": "rows of padding",
    "training": "training",
}


@dataclass(frozen=True)
class Coverage:
    """How far a verdict of "equal" extends.

    Args:
        lines: what was exercised: inputs with shapes, parameters, dtypes, branches; one short line.
        untested: what applies to the modules and was not tested, a short sentence each.

    Example:
        >>> Coverage("x (2, 3); 1 parameter; float64", ("mask has no effect on the outputs",))
        Coverage(lines='x (2, 3); 1 parameter; float64', untested=('mask has no effect ...',))
    """

    lines: str = ""
    untested: tuple[str, ...] = ()


def coverage_of(pair: Pair, checks: Sequence[Check]) -> Coverage:
    """Return what these checks exercised on a pair, and what they did not."""
    lines = list(_exercised(pair, _ran(checks)))
    for check in checks:
        lines += check.covers
    untested = [*pair.untested, *_untested(pair, checks)]
    return Coverage("; ".join(lines), tuple(untested))


def _untested(pair: Pair, checks: Sequence[Check]) -> Iterator[str]:
    for check in checks:
        yield from check.untested
    yield from _found(pair, checks)
    left_out = CHECKS.keys() - {check.name for check in checks}
    if left_out:
        yield f"{len(left_out)} of {len(CHECKS)} checks, which were not asked for"


def _exercised(pair: Pair, ran: Set[str]) -> Iterator[str]:
    """Yield inputs, extras, parameters, dtypes and branches."""
    yield from (f"{name} {array.shape} {array.dtype}" for name, array in pair.inputs.items())
    yield from sorted(pair.extras)
    count = len(pair.trainable)
    yield "1 parameter" if count == 1 else f"{count} parameters"
    # Every check that compares numbers does so in float64.
    yield ", ".join(["float64", *(dtype for dtype in LOWER if dtype in ran)])
    yield from (branch for check, branch in BRANCHES.items() if check in ran)


def _rounded_away(pair: Pair) -> Iterator[str]:
    """Yield that small differences are not seen, where parameters decide on whole numbers alone."""
    if pair.trainable and pair.possible_cotangents is None:
        yield (
            "what parameters change by little: the outputs are whole numbers, which hide small"
            " differences. Return what they are computed from as well"
        )


def _ran(checks: Sequence[Check]) -> set[str]:
    return {check.name for check in checks if check.ran}


def _found(pair: Pair, checks: Sequence[Check]) -> Iterator[str]:
    """Yield what two programs or a run of them show, where they can be run at all."""
    ran = _ran(checks)
    varied: set[str] = set()
    try:
        if "masks" in ran:
            varied.update(mask_inputs(pair))
        if "ids" in ran:
            varied.update(tables(pair))
        yield from _rounded_away(pair)
        yield from without_effect(pair, varied)
        yield from callbacks(pair, checks)
        yield from wider_dtypes(pair, checks)
    except (AdapterError, NothingCompared, NotRun) as error:
        yield f"whether every input has an effect, and which dtypes JAX computes in: {error}"
