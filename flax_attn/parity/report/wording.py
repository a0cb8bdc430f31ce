"""Numbers and verdicts in words, the same on a terminal and on a page."""

from __future__ import annotations

from flax_attn.convert.entry import Entry
from flax_attn.parity.check import Check
from flax_attn.parity.report.findings import Findings


def error(check: Check) -> str:
    """Return what was measured: a count, a share of what is allowed, or a relative error.

    Example:
        >>> [error(Check("c", 0.4567, limit)) for limit in (0.0, 1.0, 1e-12)]
        ['0.457', '0.46', '4.6e-01']
    """
    if not check.ran:
        return "-"
    if check.limit == 0:
        return f"{check.error:.3g}"
    plain = check.limit == 1 and 0.01 <= check.error < 100
    return f"{check.error:.2f}" if plain else f"{check.error:.1e}"


def rule(check: Check) -> str:
    """Return the largest error that holds.

    Example:
        >>> [rule(Check("c", 0.0, limit)) for limit in (0.0, 1.0, 1e-12)]
        ['0', '1', '1e-12']
    """
    return f"{check.limit:g}" if check.ran else "-"


def times(error: float, limit: float) -> float:
    """Return the ratio of an error to its limit.

    It is infinite for NaN, and for an error where the limit is 0.

    Example:
        >>> times(3.0, 2.0), times(0.0, 0.0), times(1.0, 0.0), times(float("nan"), 2.0)
        (1.5, 0.0, inf, inf)
    """
    # NaN alone differs from itself.
    if error != error or (error and not limit):
        return float("inf")
    return error / limit if limit else 0.0


def margin(times: float) -> str:
    """Return how many times the error fits into the rule.

    Example:
        >>> ratios = (float("inf"), 12345.0, 2.14, 0.3, 2e-11, 0.0, float("nan"))
        >>> [margin(times) for times in ratios]
        ['exact', '1e+04x', '2.1x', '0.3x', '2e-11x', '0x', '-']
    """
    if times != times:
        return "-"
    if times == float("inf"):
        return "exact"
    if times == 0:
        return "0x"
    if times >= 1000 or times < 0.1:
        return f"{times:.0e}x"
    return f"{times:.0f}x" if times >= 100 else f"{times:.1f}x"


def worst(check: Check) -> str:
    """Return the tensor with the largest error; on failure, with its worst element on both sides.

    Example:
        >>> worst(Check("c", 2.0, 1.0, "bias", where={"index": [3], "flax": 0.25, "torch": 0.5}))
        'bias[3]: flax 0.25, torch 0.5'
    """
    if check.passed or not check.where:
        return check.worst
    index = ", ".join(map(str, check.where["index"]))
    flax, torch = check.where["flax"], check.where["torch"]
    return f"{check.worst}[{index}]: flax {flax:.9g}, torch {torch:.9g}"


def verdict(report: Findings) -> str:
    """Return the verdict in a word or two, large unless it is a form of equal."""
    return report.state if report.passed else report.state.upper()


def reason(report: Findings) -> str:
    """Return what the verdict rests on, in a sentence."""
    ran = len(report.ran)
    nothing = len(report.compared_nothing)
    if not ran and not nothing:
        return report.error or "No check was run."
    if report.passed:
        return f"All {ran} checks hold; the nearest is {margin(report.margin)} below its rule."
    failed = sum(check.ran for check in report.failed)
    missing = sum(bool(check.skipped) for check in report.failed)
    parts = []
    if failed:
        parts.append(f"{failed} of {ran} checks fail")
    if nothing:
        parts.append(f"{nothing} had nothing to compare")
    if missing:
        parts.append(f"{missing} asked for by name could not be run")
    return f"{'; '.join(parts)}."


def missing(check: Check) -> str:
    """Return why nothing was measured, and whether that is a failure.

    Example:
        >>> missing(Check("c", 1.0, 1.0, skipped="no input is floating", wanted=True))
        'not run: no input is floating, and it was asked for by name'
    """
    return check.missing + (", and it was asked for by name" if check.wanted else "")


def change(entry: Entry) -> str:
    """Return how parameters of Flax become that of PyTorch."""
    return entry.rule.change or "unchanged"
