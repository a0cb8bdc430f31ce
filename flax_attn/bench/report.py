"""What was measured, for people and for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from flax_attn.bench import timing
from flax_attn.bench.contest import Row
from flax_attn.bench.figures import Goal, curve, exponent, goals, ratio

LEGEND = """\
time         median of a call; all rivals take turns in one process, warm
spread       interquartile range over the median, of so many turns
ours / it    our time over this one's: below 1 we are faster
GFLOP/s      of 2 matrix products forward, 7 with the backward pass, over the visible (query, key) pairs only, which is
             about half of T^2 where causal; for a layer its projections on top
of limit     over the best of a large matrix product that XLA reached in this run
temp MiB     beside inputs and outputs, as XLA plans it; PyTorch does not tell
jit s        to trace, lower and compile, ahead of the timing
error        against float64, over the allowed one: at most 1, or it is not timed"""


@dataclass(frozen=True)
class Report:
    """All that a run found.

    Args:
        ours: the name that ratios are about.
        sizes: which table: full, quick or given; the goals are about the full one.
        limit: the most operations a second of a large matrix product.
        machine: what the figures depend on.
        rows: what was measured.
    """

    ours: str
    sizes: str
    limit: float
    machine: dict[str, Any]
    rows: tuple[Row, ...]

    @property
    def goals(self) -> list[Goal]:
        """The goals, where they apply: to the full table, on a CPU."""
        return goals(self.rows, self.ours) if (self.sizes, self.machine["platform"]) == ("full", "cpu") else []

    def as_dict(self) -> dict[str, Any]:
        """Return rows, ratios, exponents and goals as plain data."""
        return {
            "machine": self.machine,
            "ours": self.ours,
            "sizes": self.sizes,
            "limit_flops_per_second": self.limit,
            "convention": LEGEND,
            "rows": [_record(self, row) for row in self.rows],
            "growth": [
                {"over": over, "rival": rival, "cost": cost, "exponent": exponent(*curve(self.rows, over, rival, cost))}
                for over in ("tokens", "heads")
                for cost in ("median", "temporaries")
                for rival in rivals(self.rows, over)
            ],
            "goals": [asdict(goal) | {"verdict": goal.verdict} for goal in self.goals],
        }

    def write(self, path: str) -> None:
        """Write everything as JSON."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=1) + "\n")


def _record(report: Report, row: Row) -> dict[str, Any]:
    found = asdict(row) | {"error": _finite(row.error), "median": row.median}
    found |= {"spread": timing.spread(list(row.seconds)) if row.seconds else None, "flops": row.work.flops}
    return found | {"ours_over_it": ratio(report.rows, report.ours, row), "of_limit": of_limit(report, row)}


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None


def of_limit(report: Report, row: Row) -> float | None:
    """Return what a row reached of the matrix-product limit."""
    return row.flops_per_second / report.limit if row.flops_per_second else None


def rivals(rows: Sequence[Row], section: str) -> list[str]:
    """Return who takes part in a section, in order."""
    return list(dict.fromkeys(row.rival for row in rows if row.section == section))


def machine() -> dict[str, Any]:
    """Return what the figures depend on: the processor, the versions, and how busy the machine is."""
    packages = ("jax", "jaxlib", "flax", "torch", "attnax", "numpy")
    return {
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    } | {package: _version(package) for package in packages}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
