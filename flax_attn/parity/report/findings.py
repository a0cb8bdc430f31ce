"""What a comparison found, as data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flax_attn.convert.entry import Entry
from flax_attn.parity.check import Check
from flax_attn.parity.coverage import Coverage
from flax_attn.parity.mutants import Mutants
from flax_attn.parity.pair import Pair

if TYPE_CHECKING:
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
        loosened: what the caller asked for that makes a pass worth less, in words.
        request: what was asked on the command line, as `schema.json` describes it; None from
            Python.
        error: reason why nothing could be compared; empty where something was.
        coverage: what was exercised, and what was not tested.
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
    loosened: tuple[str, ...] = ()
    request: dict[str, Any] | None = None
    error: str = ""
    coverage: Coverage = field(default_factory=Coverage)
    mutants: Mutants | None = None

    @property
    def passed(self) -> bool:
        """Whether something was measured, and every rule holds."""
        return bool(self.ran) and not self.failed

    @property
    def differs(self) -> bool:
        """Whether a rule is broken: neither that nor `passed` where nothing was compared."""
        return any(check.ran for check in self.failed)

    @property
    def state(self) -> str:
        """The verdict: "equal", "equal where tested", "different" or "not compared"."""
        if self.differs:
            return "different"
        # Without outputs to compare, that shapes agree is not worth the name.
        outputs = [self.check(name) for name in ("forward", "float32")]
        asked = [check for check in outputs if check is not None]
        if not self.ran or (asked and not any(check.ran for check in asked)):
            return "not compared"
        return "equal" if self.passed and not self.coverage.untested else "equal where tested"

    @property
    def ran(self) -> list[Check]:
        """The checks that measured something."""
        return [check for check in self.checks if check.ran]

    @property
    def compared_nothing(self) -> list[Check]:
        """The checks that apply, and had nothing to compare."""
        return [check for check in self.checks if check.nothing]

    @property
    def failed(self) -> list[Check]:
        """The checks that do not hold."""
        return [check for check in self.checks if not check.passed]

    @property
    def margin(self) -> float:
        """How many times the error of the worst check fits into its rule."""
        return min((check.margin for check in self.ran), default=np.inf)

    @property
    def causes(self) -> list[str]:
        """What both sides compute differently, one sentence each; repeated layers share one."""
        return self.difference.causes if self.difference else []

    @property
    def where(self) -> list[str]:
        """What both sides compute differently, with lines of source, and what that proves."""
        return list(self.difference.lines()) if self.difference else []

    @property
    def weaker(self) -> str:
        """What the caller loosened, in a line; empty where all rules are the defaults."""
        return f"loosened by the caller: {'; '.join(self.loosened)}" if self.loosened else ""

    def check(self, name: str) -> Check | None:
        """Return the check of a name."""
        return next((check for check in self.checks if check.name == name), None)

    def explain(self) -> str:
        """Return the verdict as a failing test prints it: causes, nodes, then failed checks."""
        if self.passed:
            return "\n  ".join(self._explain_pass())
        verdict = "not proven that both sides are the same function"
        if self.differs:
            verdict = "the two sides differ"
        # Nothing has failed where nothing has run: then that is what to explain.
        failed = self.failed or [check for check in self.checks if not check.ran]
        lines = [f"{self.name}: {verdict}", *self.where, *_explained(failed)]
        if self.command:
            lines.append(f"repeat: {self.command}")
        return "\n  ".join(lines)

    def _explain_pass(self) -> Iterator[str]:
        by = "exactly" if np.isinf(self.margin) else f"{self.margin:.3g}x below the rules"
        untested = self.coverage.untested
        where = " where tested" if untested else ""
        weaker = f" ({self.weaker})" if self.loosened else ""
        yield f"{self.name}: both sides are the same function{where}, {by}{weaker}"
        for sentence in untested:
            yield f"not tested: {sentence}"


def _explained(checks: Sequence[Check]) -> Iterator[str]:
    """Yield a line for each check; those that have nothing to compare for one reason share one."""
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for check in checks:
        if check.nothing:
            alike[check.missing].append(check.name)
    # An empty batch, for one, is a reason of nearly all checks.
    for reason, names in alike.items():
        yield f"{', '.join(names)}: {reason}"
    yield from (check.explain() for check in checks if not check.nothing)
