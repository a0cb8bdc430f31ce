"""What a comparison found, as data."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import numpy as np

from flax_attn.convert.rules import Entry
from flax_attn.parity.check import Check, finite
from flax_attn.parity.pair import Pair

PACKAGES = ("jax", "jaxlib", "flax", "torch", "numpy", "optax", "flax-attn")


@dataclass(frozen=True)
class Report:
    """Everything a comparison found.

    Args:
        name: of what was compared.
        checks: in the order of the ladder, those not run with the reason.
        entries: the weight map.
        notes: what a reader should know before the run, such as defaults in which the frameworks differ.
        seed: of everything that was drawn.
        environment: versions, devices and settings.
        command: repeats the comparison from a shell; empty where it was called from Python.
        divergence: where the two sides part, if a check failed and this could be found out.
        pair: both sides, for pictures; not part of the written report.
    """

    name: str
    checks: list[Check]
    entries: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seed: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    command: str = ""
    divergence: Any = None
    pair: Pair | None = field(default=None, repr=False)

    @property
    def passed(self) -> bool:
        """Whether something was measured, and every rule holds."""
        return all(check.passed for check in self.checks) and any(check.ran for check in self.checks)

    @property
    def failed(self) -> list[Check]:
        """The checks that do not hold."""
        return [check for check in self.checks if not check.passed]

    @property
    def margin(self) -> float:
        """How far below its rule the worst check is."""
        return min((check.margin for check in self.checks if check.ran), default=np.inf)

    def check(self, name: str) -> Check | None:
        """Return the check of a name."""
        return next((check for check in self.checks if check.name == name), None)

    def explain(self) -> str:
        """Return the verdict in words, as a failing test prints it."""
        failed = self.failed or [check for check in self.checks if not check.ran]
        if self.passed:
            return f"{self.name}: both sides are the same function, {self.margin:.3g}x below the rules"
        lines = [f"{self.name}: the two sides differ", *(f"  {check.explain()}" for check in failed)]
        lines += [f"  {line}" for line in str(self.divergence).splitlines()] if self.divergence else []
        return "\n".join([*lines, f"  repeat: {self.command}"] if self.command else lines)

    def as_dict(self) -> dict[str, Any]:
        """Return all that was measured, for JSON; what is infinite or NaN is None there."""
        return {
            "variant": self.name,
            "passed": self.passed,
            "seed": self.seed,
            "command": self.command,
            "notes": self.notes,
            "checks": [_record(check) for check in self.checks],
            "weights": [_row(entry) for entry in self.entries],
            "divergence": None if self.divergence is None else self.divergence.as_dict(),
        }


def environment() -> dict[str, str]:
    """Return what results depend on: versions, devices, precision."""
    found = {"python": platform.python_version(), "machine": platform.machine(), "platform": platform.platform()}
    found |= {package: _version(package) for package in PACKAGES}
    found["jax devices"] = ", ".join(str(device) for device in jax.devices())
    for setting in ("jax_enable_x64", "jax_default_matmul_precision"):
        found[setting] = str(getattr(jax.config, setting))
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        found["torch threads"] = str(torch.get_num_threads())
        found["torch float32 matmul precision"] = torch.get_float32_matmul_precision()
        found["torch TF32 (matmul, cuDNN)"] = (
            f"{torch.backends.cuda.matmul.allow_tf32}, {torch.backends.cudnn.allow_tf32}"
        )
    return found | {name: os.environ[name] for name in ("XLA_FLAGS", "JAX_PLATFORMS") if name in os.environ}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def write_json(reports: list[Report], path: str) -> None:
    """Write everything that was measured, and where: seed and environment are those of the reports."""
    variants = [report.as_dict() for report in reports]
    good = all(report.passed for report in reports)
    content = {"passed": good, "seed": reports[0].seed, "environment": reports[0].environment, "variants": variants}
    with open(path, "w") as file:
        file.write(json.dumps(content, indent=1) + "\n")


def _record(check: Check) -> dict[str, Any]:
    record = {key: finite(value) for key, value in asdict(check).items()}
    return record | {"passed": check.passed, "margin": finite(check.margin)}


def _row(entry: Entry) -> dict[str, Any]:
    return {
        "flax": list(entry.ours),
        "torch": entry.theirs,
        "shapes": [list(shape) for shape in entry.shapes],
        "shape": list(entry.shape),
        "pattern": entry.rule.pattern or "as it is",
    }
