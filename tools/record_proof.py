"""Keep the errors of runs of the proof in `docs/proof.csv` and `docs/proof_real.csv`.

`make parity ARGS="--full --report build/proof.json"` makes a run, and
`python tools/record_proof.py build/proof.json` keeps it. With `--sizes real` in place of `--full`
it is one of real sizes, which is kept in the second file. Rows may be in reports of their own.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
CHECKS = (
    "forward",
    "gradients",
    "float32",
    "bfloat16",
    "float16",
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
    """Write the table of the reports that are named on the command line."""
    reports = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    rows = [row(variant) for report in reports for variant in report["variants"]]
    # A check that no variant has is no column.
    columns = [name for name in rows[0] if any(row[name] != "-" for row in rows)]
    real = rows[0]["variant"].startswith("real_")
    page = DOCS / ("proof_real.csv" if real else "proof.csv")
    with page.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{page}: {len(rows)} variants")


if __name__ == "__main__":
    main()
