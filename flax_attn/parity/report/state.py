"""What follows from the verdict of a comparison: the exit code, and what to look at next."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flax_attn.parity.report.findings import Findings

#: Exit codes of `flax-attn compare`, by state.
EXIT_CODES = {"equal": 0, "different": 1, "equal where tested": 2, "not compared": 3}


def next_steps(report: Findings) -> list[str]:
    """Return what to look at next, the most useful first."""
    steps = [report.error] if report.error else []
    if report.differs:
        steps.append(_first_difference(report))
    nothing = ", ".join(check.name for check in report.compared_nothing)
    if nothing:
        steps.append(f"do what these say, which had nothing to compare: {nothing}")
    if report.coverage.untested:
        steps.append("pass inputs or options that test what is listed as not tested")
    if report.loosened:
        steps.append("compare again without what loosens the rules")
    return steps


def _first_difference(report: Findings) -> str:
    shapes = report.check("shapes")
    unlike = [shapes.note] if shapes is not None and shapes.failed and shapes.note else []
    # What comes later may follow from it. Where float64 agrees, no place does: a check says more.
    agrees = report.difference is not None and report.difference.agrees
    for found in (unlike, report.causes, [] if agrees else report.where):
        if found:
            return f"mend this first, and compare again: {found[0]}"
    worst = next(check for check in report.failed if check.ran)
    if worst.raised:
        return f"make this call run, as it does on the other side: {worst.name}: {worst.note}"
    if agrees:
        return (
            "look at what this check alone shows, as every operation agrees in float64; if it holds"
            f" with another seed, it is rounding: {worst.explain()}"
        )
    return f"find what makes this differ, in the place that no node shows: {worst.explain()}"
