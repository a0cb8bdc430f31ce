"""The verdict of a comparison in one of four states, and what it rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flax_attn.parity.report.findings import Findings

EQUAL, DIFFERENT = "equal", "different"
EQUAL_WHERE_TESTED, NOT_COMPARED = "equal where tested", "not compared"
#: Exit codes of `flax-attn compare`, by state.
EXIT_CODES = {EQUAL: 0, DIFFERENT: 1, EQUAL_WHERE_TESTED: 2, NOT_COMPARED: 3}


def state(report: Findings) -> str:
    """Return the state of a report, a key of `EXIT_CODES`.

    Example:
        >>> from flax_attn.parity import Check, Report
        >>> held, broken = Check("forward", 0.0, 1e-12), Check("forward", 1.0, 1e-12)
        >>> raised = Check("second", 0.0, 0.0, nothing="the check raised KeyError: 'x'")
        >>> [state(Report("x", checks)) for checks in ([held], [broken], [held, raised], [raised])]
        ['equal', 'different', 'equal where tested', 'not compared']
    """
    known = getattr(report, "state", "")
    if known:
        return known
    if report.differs:
        return DIFFERENT
    if report.passed:
        return EQUAL
    # Without outputs to compare, that shapes agree is not worth the name.
    forward = report.check("forward")
    compared = any(check.ran for check in report.checks)
    if not compared or (forward is not None and not forward.ran):
        return NOT_COMPARED
    return EQUAL_WHERE_TESTED


def coverage(report: Findings) -> dict[str, list[str]]:
    """Return what was exercised, and what was not, in sentences."""
    found = getattr(report, "coverage", None)
    if found is None:
        return {"lines": [], "untested": []}
    lines = [found.lines] if isinstance(found.lines, str) else list(found.lines)
    return {"lines": lines, "untested": list(found.untested)}


def next_steps(report: Findings) -> list[str]:
    """Return what to look at next, the most useful first."""
    steps = [report.error] if report.error else []
    if report.differs:
        steps.append(_first_difference(report))
    nothing = [check.name for check in report.checks if check.nothing]
    if nothing:
        steps.append(f"do what these say, which had nothing to compare: {', '.join(nothing)}")
    untested = coverage(report)["untested"]
    steps += [f"not tested: {sentence}" for sentence in untested]
    if report.loosened:
        steps.append("compare again without what loosens the rules")
    return steps


def _first_difference(report: Findings) -> str:
    # What comes later may follow from it.
    for found in (report.causes, report.where):
        if found:
            return f"mend this first, and compare again: {found[0]}"
    worst = next(check for check in report.failed if check.ran)
    return f"find what makes this differ, in the place that no node shows: {worst.explain()}"
