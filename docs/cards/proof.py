"""The recorded run of the proof: `docs/proof.csv`, which `docs/proof.md` shows."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

CHECKS = "forward", "gradients", "training"  # whose errors a card shows


class Proven(NamedTuple):
    """Results of the run for some variants: their worst errors and the smallest margin.

    The margin is how far the worst check is below its rule.
    """

    errors: dict[str, float]
    margin: float


def recorded(page: Path = Path(__file__).parents[1] / "proof.csv") -> dict[str, dict[str, str]]:
    """Return what the run says of each variant, by the heads of the columns.

    Raises:
        ValueError: if the file is no such table.
    """
    with page.open() as file:
        rows = list(csv.DictReader(file))
    if not rows or not {"variant", "margin", "verdict", *CHECKS} <= rows[0].keys():
        raise ValueError(
            f"{page} must be the table of a run of the proof. Write it by tools/record_proof.py"
        )
    return {row.pop("variant"): row for row in rows}


def worst(variants: Iterable[str], rows: dict[str, dict[str, str]]) -> Proven:
    """Return the worst of what the run found of these variants.

    Raises:
        ValueError: if the run does not have one of them, or found it different.
    """
    variants = list(variants)
    bad = [name for name in variants if rows.get(name, {}).get("verdict") != "equal"]
    if bad:
        raise ValueError(
            f"the recorded run must find {', '.join(bad)} equal. Run the proof"
            " and tools/record_proof.py again"
        )
    found = {
        check: [float(rows[name][check]) for name in variants if rows[name][check] != "-"]
        for check in CHECKS
    }
    errors = {check: max(values) for check, values in found.items() if values}
    return Proven(errors, min(float(rows[name]["margin"].rstrip("x")) for name in variants))
