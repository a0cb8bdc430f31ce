"""Keep the errors of a run of the proof in `docs/proof.csv`, which the site shows.

`make parity ARGS="--full --report build/proof.json"` makes the run, and
`python tools/record_proof.py build/proof.json` keeps it.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "proof.csv"
CHECKS = (
    "forward",
    "gradients",
    "float32",
    "jit = eager",
    "dropout",
    "unbatched",
    "cache = full",
    "training",
)


def row(variant: dict[str, Any]) -> dict[str, str]:
    """Return the line of one variant of a report: `-` where a check does not apply."""
    errors = {check["name"]: check["error"] for check in variant["checks"]}
    margins = [check["margin"] for check in variant["checks"] if check["error"]]
    found = {"variant": variant["name"]}
    for check in CHECKS:
        error = errors.get(check)
        found[check] = "-" if error is None else f"{error:.1e}"
    found["margin"] = f"{min(margins):.1f}x"
    found["verdict"] = "equal" if variant["passed"] else "DIFFERENT"
    return found


def main() -> None:
    """Write the table of the report that is named on the command line."""
    report = json.loads(Path(sys.argv[1]).read_text())
    rows = [row(variant) for variant in report["variants"]]
    with PAGE.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{PAGE}: {len(rows)} variants")


if __name__ == "__main__":
    main()
