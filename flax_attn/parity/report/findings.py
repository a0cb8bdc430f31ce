"""What a comparison found, as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from flax_attn.convert.rules import Entry
from flax_attn.parity.check import Check, finite
from flax_attn.parity.mutants import Mutants
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace.difference import Difference


@dataclass(frozen=True)
class Findings:
    """Everything a comparison found.

    Args:
        name: name of the comparison.
        checks: checks in the order in which they ran; those that did not run have the reason.
        entries: the pairs of parameters, as the layout makes them.
        notes: notes to read before the run, such as defaults that differ between the frameworks.
        seed: seed of everything that was drawn.
        environment: versions, devices and settings.
        command: shell command that repeats the comparison; empty if called from Python.
        difference: what both sides compute differently, if a check failed and they could be
            found.
        pair: both sides, for pictures; not part of the written report.
        mutants: which edits of the JAX side the checks detect; None if none were planted.
    """

    name: str
    checks: list[Check]
    entries: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seed: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    command: str = ""
    difference: Difference | None = None
    pair: Pair | None = None
    mutants: Mutants | None = None

    @property
    def passed(self) -> bool:
        """Whether something was measured, and every rule holds."""
        measured = any(check.ran for check in self.checks)
        return measured and not self.failed

    @property
    def differs(self) -> bool:
        """Whether a rule is broken: neither that nor `passed` where nothing was compared."""
        return any(check.ran for check in self.failed)

    @property
    def failed(self) -> list[Check]:
        """The checks that do not hold."""
        return [check for check in self.checks if not check.passed]

    @property
    def margin(self) -> float:
        """How many times the error of the worst check fits into its rule."""
        return min((check.margin for check in self.checks if check.ran), default=np.inf)

    @property
    def causes(self) -> list[str]:
        """What both sides compute differently, one sentence each; repeated layers share one."""
        return self.difference.causes if self.difference else []

    @property
    def where(self) -> list[str]:
        """What both sides compute differently, with lines of source, and what that proves."""
        return list(self.difference.lines()) if self.difference else []

    def check(self, name: str) -> Check | None:
        """Return the check of a name."""
        return next((check for check in self.checks if check.name == name), None)

    def explain(self) -> str:
        """Return the verdict as a failing test prints it: causes, nodes, then failed checks."""
        if self.passed:
            by = "exactly" if np.isinf(self.margin) else f"{self.margin:.3g}x below the rules"
            return f"{self.name}: both sides are the same function, {by}"
        failed = self.failed or [check for check in self.checks if not check.ran]
        verdict = "not proven that both sides are the same function"
        if self.differs:
            verdict = "the two sides differ"
        lines = [f"{self.name}: {verdict}", *self.where, *_explained(failed)]
        if self.command:
            lines.append(f"repeat: {self.command}")
        return "\n  ".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return all measurements for JSON, causes first; infinities and NaN become None."""
        return {
            "variant": self.name,
            "passed": self.passed,
            "causes": self.causes,
            "difference": None if self.difference is None else self.difference.as_dict(),
            "checks": [_record(check) for check in self.checks],
            "differs": self.differs,
            "weights": [_row(entry) for entry in self.entries],
            "notes": self.notes,
            "mutants": None if self.mutants is None else self.mutants.as_dict(),
            "seed": self.seed,
            "command": self.command,
        }


def _explained(checks: Sequence[Check]) -> Iterator[str]:
    """Yield a line for each check; those that have nothing to compare for one reason share one."""
    alike: dict[str, list[str]] = {}
    for check in checks:
        if check.nothing:
            alike.setdefault(check.missing, []).append(check.name)
    yield from (f"{', '.join(names)}: {reason}" for reason, names in alike.items())
    yield from (check.explain() for check in checks if not check.nothing)


def _record(check: Check) -> dict[str, Any]:
    record = {key: finite(value) for key, value in asdict(check).items()}
    return record | {"passed": check.passed, "margin": finite(check.margin)}


def _row(entry: Entry) -> dict[str, Any]:
    return {
        "flax": list(entry.ours),
        "torch": entry.theirs,
        "shapes": [list(shape) for shape in entry.shapes],
        "shape": list(entry.shape),
        "pattern": entry.rule.pattern or "unchanged",
    }
