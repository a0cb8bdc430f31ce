"""What a run measured, as data."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from flax_attn.bench import timing
from flax_attn.bench.benchmark import Measurement
from flax_attn.bench.figures import curve, exponent, names, ratio, summary
from flax_attn.convert.replacing import replacing

LEGEND = (
    "time         of a call, the least of its turns: others use the machine too. All take "
    "turns in one process, warm\n"
    "spread       interquartile range over the median, of so many turns\n"
    "ours / it    our time over this one's: below 1 we are faster\n"
    "GFLOP/s      of 2 matrix products forward, 7 with the backward pass, over the visible "
    "(query, key) pairs only, which is\n"
    "             about half of T^2 where causal; for a layer its projections on top\n"
    "of limit     over the best of a large matrix product that XLA reached in this run\n"
    "temp MiB     beside inputs and outputs, as XLA plans it; PyTorch reports none\n"
    "jit s        to trace, lower and compile, ahead of the timing\n"
    "error        against float64, over the allowed one: at most 1, or it is not timed"
)


@dataclass(frozen=True)
class BenchmarkReport:
    """All that a run measured.

    Args:
        ours: implementation that ratios are about.
        sizes: table of sizes: full, quick or given; only the full one is summarised.
        limit: most operations a second of a large matrix product.
        machine: description of what the figures depend on.
        rows: measurements.
    """

    ours: str
    sizes: str
    limit: float
    machine: dict[str, Any]
    rows: tuple[Measurement, ...]

    @property
    def summary(self) -> dict[str, float]:
        """The figures that say most, of the full table."""
        return summary(self.rows, self.ours) if self.sizes == "full" else {}

    def of_limit(self, row: Measurement) -> float | None:
        """Return the rate of a measurement over that of a large matrix product."""
        # May be above 1 for a moment: the limit is the best of two measurements, not a bound.
        return row.flops_per_second / self.limit if row.flops_per_second else None

    def as_dict(self) -> dict[str, Any]:
        """Return measurements, ratios, exponents and the summary as plain data."""
        # Exponents of time and memory, as the tables of growth show them.
        growth = []
        for over in ("tokens", "heads"):
            for cost in ("best", "temporaries"):
                growth += self._growth(over, cost)
        return {
            "machine": self.machine,
            "ours": self.ours,
            "sizes": self.sizes,
            "limit_flops_per_second": self.limit,
            "convention": LEGEND,
            "rows": [self._record(row) for row in self.rows],
            "growth": growth,
            "summary": self.summary,
        }

    def _growth(self, over: str, cost: str) -> list[dict[str, Any]]:
        found = []
        for name in names(self.rows, over):
            fitted = exponent(*curve(self.rows, over, name, cost))
            one = {"over": over, "implementation": name, "cost": cost, "exponent": fitted}
            found.append(one)
        return found

    def write(self, path: str) -> None:
        """Write everything as JSON."""
        with replacing(path) as whole:
            whole.write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    def _record(self, row: Measurement) -> dict[str, Any]:
        spread = None
        if row.seconds:
            spread = timing.spread(list(row.seconds))
        measured = asdict(row)
        return measured | {
            "error": _finite(row.error),
            "best": row.best,
            "spread": spread,
            "flops": row.work.flops,
            "ours_over_it": ratio(self.rows, self.ours, row),
            "of_limit": self.of_limit(row),
        }


def _finite(value: float | None) -> float | None:
    # JSON has neither infinity nor NaN.
    return value if value is not None and abs(value) < float("inf") else None
