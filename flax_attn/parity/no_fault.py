"""Checks that fail by no fault of the port: by tables in float32, or by what XLA computes wrongly.

They are set aside, so that the verdict is `equal where tested`, and the report says why. A program
that XLA computes wrongly is proven equal by nothing, so that a test of it fails all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import jax

from flax_attn.parity.check import Check
from flax_attn.parity.checks import run_checks
from flax_attn.parity.pair import Pair

if TYPE_CHECKING:
    from flax_attn.parity.trace.difference import Difference


# A table in float32 is off by 1e-7 in numbers near 1, where the rule for outputs is 1e-12.
TABLE_MARGIN = 1e-7
ROUNDED = "beyond the digits of a table in float32, which the report names"
MISCOMPILED = "XLA computes it wrongly once it is compiled, and operation by operation it holds"


def set_aside(pair: Pair, checks: list[Check], difference: Difference | None) -> list[Check]:
    """Return the checks, where those that fail by no fault of the port say so instead.

    Args:
        pair: both sides.
        checks: the checks that ran.
        difference: what both sides compute differently; None if it was not looked for.
    """
    if difference is None or not any(check.failed for check in checks):
        return checks
    if _rounds_tables(checks, difference):
        return list(_without_failed(checks, ROUNDED, {"skipped": ROUNDED}))
    if difference.miscompiled and _hold_operation_by_operation(pair, checks):
        return list(_without_failed(checks, MISCOMPILED, {"nothing": MISCOMPILED}))
    return checks


def _rounds_tables(checks: Sequence[Check], difference: Difference) -> bool:
    """Whether all that fails are the last digits of tables that are built in float32.

    The search has proven that the outputs are equal with the same numbers in these tables, and the
    check in float32 that nothing else differs by as much as float32 rounds.
    """
    kinds = {found.parameter for found in difference.hypotheses}
    by_name = {check.name: check for check in checks}
    float32 = by_name.get("float32")
    if not difference.repaired or kinds != {"rounding"} or float32 is None:
        return False
    margins = [check.margin for check in checks if check.failed]
    return float32.ran and float32.passed and min(margins) >= TABLE_MARGIN


def _hold_operation_by_operation(pair: Pair, checks: Sequence[Check]) -> bool:
    """Whether the checks that fail hold if JAX compiles nothing."""
    names = [check.name for check in checks if check.failed]
    # With this adapter again, so that nothing is kept that ran compiled.
    uncompiled = pair.with_flax(pair.flax)
    with jax.disable_jit():
        return all(check.passed for check in run_checks(uncompiled, names))


def _without_failed(
    checks: Sequence[Check], reason: str, instead: Mapping[str, str]
) -> Iterator[Check]:
    """Yield checks, where those that fail have something else instead; one of them says why."""
    failed = [check.name for check in checks if check.failed]
    names = ", ".join(failed)
    untested = (f"{names}: {reason}",)
    for check in checks:
        if not check.failed:
            yield check
            continue
        yield replace(check, **instead, untested=untested)
        untested = ()
