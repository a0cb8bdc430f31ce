"""Keep the errors of runs of the proof in `docs/proof.csv` and `docs/proof_real.csv`.

`make parity ARGS="--full --report build/proof.json"` makes a run, and
`python tools/record_proof.py build/proof.json` keeps it. With `--sizes real` in place of `--full`
it is one of real sizes, which is kept in the second file. Rows may be in reports of their own.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
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
    checks = variant["checks"]
    errors = {check["name"]: check["error"] for check in checks}
    # The margin of an error of 0 has no bound.
    margin = min(check["margin"] for check in checks if check["error"])
    found = {"variant": variant["name"]}
    for check in CHECKS:
        error = errors.get(check)
        found[check] = "-" if error is None else f"{error:.1e}"
    found["margin"] = f"{margin:.1f}x"
    found["verdict"] = "equal" if variant["passed"] else "DIFFERENT"
    return found


def main() -> None:
    """Write the table of the reports that are named on the command line."""
    rows = []
    for name in sys.argv[1:]:
        report = json.loads(Path(name).read_text())
        rows += map(row, report["variants"])
    write(rows)


def write(rows: Sequence[dict[str, str]]) -> None:
    """Write the table of these variants, which are all of one kind."""
    first = rows[0]
    # A check that no variant has is no column.
    columns = [name for name in first if any(one[name] != "-" for one in rows)]
    name = "proof.csv"
    if first["variant"].startswith("real_"):
        name = "proof_real.csv"
    page = DOCS / name
    # The writer ends the lines itself.
    with page.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{page}: {len(rows)} variants")


if __name__ == "__main__":
    main()
