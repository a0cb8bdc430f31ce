"""What a comparison found, as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from flax_attn.convert.rules import Entry
from flax_attn.parity.check import Check, finite
from flax_attn.parity.coverage import Coverage
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace.causes import grouped
from flax_attn.parity.trace.divergence import Divergence


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
        divergence: the place and the causes of the difference, if a check failed and they could be
            found.
        pair: both sides, for pictures; not part of the written report.
        coverage: what was exercised, and what was not tested.
    """

    name: str
    checks: list[Check]
    entries: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seed: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    command: str = ""
    divergence: Divergence | None = None
    pair: Pair | None = None
    coverage: Coverage = field(default_factory=Coverage)

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
    def state(self) -> str:
        """The verdict: "equal", "equal where tested", "different" or "not compared"."""
        if self.differs:
            return "different"
        if not self.passed:
            return "not compared"
        return "equal where tested" if self.coverage.untested else "equal"

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
        """The known causes of the difference, one sentence each; repeated layers share one."""
        return grouped(self.divergence.causes) if self.divergence else []

    @property
    def where(self) -> list[str]:
        """Where the sides differ, a line each: the first difference, then locally wrong nodes."""
        return list(self.divergence.where()) if self.divergence else []

    def check(self, name: str) -> Check | None:
        """Return the check of a name."""
        return next((check for check in self.checks if check.name == name), None)

    def explain(self) -> str:
        """Return the verdict as a failing test prints it: causes, nodes, then failed checks."""
        if self.passed:
            by = "exactly" if np.isinf(self.margin) else f"{self.margin:.3g}x below the rules"
            where = " where tested" if self.coverage.untested else ""
            line = f"{self.name}: both sides are the same function{where}, {by}"
            missing = [f"not tested: {sentence}" for sentence in self.coverage.untested]
            return "\n  ".join([line, *missing])
        failed = self.failed or [check for check in self.checks if not check.ran]
        verdict = "not proven that both sides are the same function"
        if self.differs:
            verdict = "the two sides differ"
        lines = [f"{self.name}: {verdict}", *self.causes, *self.where, *_explained(failed)]
        if self.command:
            lines.append(f"repeat: {self.command}")
        return "\n  ".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return all measurements for JSON, causes first; infinities and NaN become None."""
        return {
            "variant": self.name,
            "state": self.state,
            "passed": self.passed,
            "coverage": asdict(self.coverage),
            "causes": list(self.divergence.causes) if self.divergence else [],
            "divergence": None if self.divergence is None else self.divergence.as_dict(),
            "checks": [_record(check) for check in self.checks],
            "differs": self.differs,
            "weights": [_row(entry) for entry in self.entries],
            "notes": self.notes,
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
