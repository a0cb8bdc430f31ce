"""Keep the errors of runs of the proof in `docs/proof.csv` and `docs/proof_real.csv`.

`make parity ARGS="--full --report build/proof.json"` makes a run, and
`python tools/record_proof.py build/proof.json` keeps it. With `--sizes real` in place of `--full`
it is one of real sizes, which is kept in the second file. Rows may be in reports of their own: a
variant that no report has keeps its row.
"""

from __future__ import annotations

import argparse
import csv
import json
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
    """Write the rows of the reports that are named on the command line into their table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("reports", nargs="+", type=Path, help="reports of flax-attn parity")
    options = parser.parse_args()
    rows = []
    for path in options.reports:
        text = path.read_text()
        report = json.loads(text)
        rows += map(row, report["variants"])
    write(rows)


def kept(page: Path) -> list[dict[str, str]]:
    """Return the rows of a table, with `-` for the columns that it leaves out."""
    if not page.exists():
        return []
    names = ("variant", *CHECKS, "margin", "verdict")
    rows = []
    with page.open(newline="") as file:
        for one in csv.DictReader(file):
            whole: dict[str, str] = dict.fromkeys(names, "-")
            whole.update(one)
            rows.append(whole)
    return rows


def write(rows: Sequence[dict[str, str]]) -> None:
    """Write the rows of these variants, which are all of one kind, into their table."""
    name = "proof.csv"
    if rows[0]["variant"].startswith("real_"):
        name = "proof_real.csv"
    page = DOCS / name
    # What is recorded now replaces what was.
    table = {}
    for one in (*kept(page), *rows):
        table[one["variant"]] = one
    # A check that no variant has is no column.
    columns = []
    for column in rows[0]:
        values = {one[column] for one in table.values()}
        if values != {"-"}:
            columns.append(column)
    # The writer ends the lines itself.
    with page.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(table.values())
    print(f"{page}: {len(table)} variants")


if __name__ == "__main__":
    main()
