"""The recorded run of the proof: what `make parity` printed, as `docs/proof.md` shows it."""

from __future__ import annotations

import re
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


def recorded(page: Path = Path(__file__).parents[1] / "proof.md") -> dict[str, dict[str, str]]:
    """Return what the run says of each variant, by the heads of the columns.

    Raises:
        ValueError: if the page has no such table.
    """
    lines = [line.strip() for line in page.read_text().splitlines()]
    start = next(
        (i for i, line in enumerate(lines) if re.match(r"variant +forward +gradients", line)), None
    )
    if start is None:
        raise ValueError(
            f"{page} must hold the table that `make parity` prints, from `variant  forward "
            " gradients` on"
        )
    heads = [*re.split(r"\s{2,}", lines[start]), "verdict"]
    rows = {}
    for line in lines[start + 2 :]:
        if not line:
            return rows
        values = dict(zip(heads, line.split(), strict=True))
        rows[values.pop("variant")] = values
    raise ValueError(
        f"the table in {page} must end with an empty line; it has none. Copy the whole output"
    )


def worst(variants: Iterable[str], rows: dict[str, dict[str, str]]) -> Proven:
    """Return the worst of what the run found of these variants.

    Raises:
        ValueError: if the run does not have one of them, or found it different.
    """
    variants = list(variants)
    bad = [name for name in variants if rows.get(name, {}).get("verdict") != "equal"]
    if bad:
        raise ValueError(
            f"the recorded run must find {', '.join(bad)} equal. Run `make parity` and copy what it"
            " prints"
        )
    found = {
        check: [float(rows[name][check]) for name in variants if rows[name][check] != "-"]
        for check in CHECKS
    }
    errors = {check: max(values) for check, values in found.items() if values}
    return Proven(errors, min(float(rows[name]["margin"].rstrip("x")) for name in variants))
