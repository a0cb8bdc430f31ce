"""What a comparison found, as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from flax_attn.convert.rules import Entry
from flax_attn.parity.check import Check, finite
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace.causes import grouped
from flax_attn.parity.trace.divergence import Divergence


@dataclass(frozen=True)
class Findings:
    """Everything a comparison found.

    Args:
        name: of what was compared.
        checks: in the order in which they were run, those not run with the reason.
        entries: the pairs of parameters, as the layout makes them.
        notes: what a reader should know before the run, such as defaults in which the frameworks
            differ.
        seed: of everything that was drawn.
        environment: versions, devices and settings.
        command: repeats the comparison from a shell; empty where it was called from Python.
        divergence: where the two sides differ and why, if a check failed and this could be found
            out.
        pair: both sides, for pictures; not part of the written report.
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

    @property
    def passed(self) -> bool:
        """Whether something was measured, and every rule holds."""
        return all(check.passed for check in self.checks) and any(
            check.ran for check in self.checks
        )

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
        """What is known to make the two sides differ, one sentence each; those of repeated layers are one."""
        return grouped(self.divergence.causes) if self.divergence else []

    @property
    def where(self) -> list[str]:
        """Where the two sides differ, one line each: the first difference, and what is locally wrong."""
        return list(self.divergence.where()) if self.divergence else []

    def check(self, name: str) -> Check | None:
        """Return the check of a name."""
        return next((check for check in self.checks if check.name == name), None)

    def explain(self) -> str:
        """Return the verdict in words, as a failing test prints it: causes, then nodes, then the checks that fail."""
        if self.passed:
            by = "exactly" if np.isinf(self.margin) else f"{self.margin:.3g}x below the rules"
            return f"{self.name}: both sides are the same function, {by}"
        failed = self.failed or [check for check in self.checks if not check.ran]
        lines = [*self.causes, *self.where, *_explained(failed)]
        lines += [f"repeat: {self.command}"] if self.command else []
        verdict = (
            "the two sides differ"
            if self.differs
            else "not proven that both sides are the same function"
        )
        return "\n  ".join([f"{self.name}: {verdict}", *lines])

    def as_dict(self) -> dict[str, Any]:
        """Return all that was measured, for JSON, causes first; what is infinite or NaN is None there."""
        return {
            "variant": self.name,
            "passed": self.passed,
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
