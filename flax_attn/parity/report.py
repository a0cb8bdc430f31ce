"""The ladder's results for people and for programs."""

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from flax_attn.parity import tolerance
from flax_attn.parity.ladder import Check

Results = Mapping[str, Sequence[Check]]

COLUMNS = ("forward", "gradients", "float32", "jit = eager", "dropout", "unbatched", "layouts", "training")

_LOW, _LOW_GRADIENT = f"{tolerance.LOW_FORWARD:.0f}x", f"{tolerance.LOW_GRADIENT:.0f}x"

LEGEND = f"""\
forward      float64: largest error over largest value, outputs and weights         rule {tolerance.FORWARD:.0e}
gradients    float64: every parameter and input, under random cotangents            rule {tolerance.GRADIENT:.0e}
float32      error over the allowed one: {_LOW} PyTorch's own, {_LOW_GRADIENT} for gradients         rule 1
jit = eager  float64: compiled against eager                                        rule {tolerance.FORWARD:.0e}
dropout      float64: train mode with one dropout key, outputs and gradients        rule {tolerance.GRADIENT:.0e}
unbatched    float64: one example without a batch axis                              rule {tolerance.FORWARD:.0e}
layouts      weight layouts that come back bit for bit, every element in its place
training     float64: losses and parameters over 100 steps of AdamW, dropout on     rule {tolerance.TRAINING:.0e}
margin       how far below its rule the worst check is;  -  does not apply"""


def passed(results: Results) -> bool:
    """Whether every check of every case holds."""
    return all(check.passed for checks in results.values() for check in checks)


def table(results: Results) -> Table:
    """Return one row a variant."""
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    rows.add_column("variant", no_wrap=True)
    for column in (*COLUMNS, "margin", ""):
        rows.add_column(column, justify="right", no_wrap=True)
    for name, checks in results.items():
        by_name = {check.name: check for check in checks}
        margin = min(check.margin for check in checks)
        good = all(check.passed for check in checks)
        cells = [_cell(by_name.get(column)) for column in COLUMNS]
        rows.add_row(name, *cells, f"{margin:.1f}x" if margin < 100 else f"{margin:.0f}x", _verdict(good))
    return rows


def _cell(check: Check | None) -> Text:
    if check is None:
        return Text("-", style="dim")
    if check.name == "layouts" and check.passed:
        return Text(str(len(check.note.split(", "))))
    shown = f"{check.error:.2f}" if check.name == "float32" else f"{check.error:.1e}"
    return Text(shown, style="" if check.passed else "bold red")


def _verdict(good: bool) -> Text:
    return Text("equal", style="green") if good else Text("DIFFERENT", style="bold red")


def notes(results: Results) -> list[str]:
    """Return a line for every case with gradients that are rounding only."""
    return [f"{name}: {c.note}" for name, checks in results.items() for c in checks if c.name == "gradients" and c.note]


def failures(results: Results) -> list[str]:
    """Return a line for every check that does not hold."""
    return [
        f"{name}: {check.name}: error {check.error:.3g} at {check.worst!r}, the rule is {check.limit:.0e}"
        for name, checks in results.items()
        for check in checks
        if not check.passed
    ]


def environment() -> dict[str, str]:
    """Return what the results depend on."""
    packages = ("jax", "flax", "torch", "numpy", "optax")
    return {"python": platform.python_version(), "machine": platform.machine()} | {p: version(p) for p in packages}


def write_json(results: Results, seed: int, path: str) -> None:
    """Write everything that was measured; an infinite error is written as null."""
    cases = [
        {"variant": name, "passed": all(check.passed for check in checks), "checks": [_record(c) for c in checks]}
        for name, checks in results.items()
    ]
    content = {"passed": passed(results), "seed": seed, "environment": environment(), "cases": cases}
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


def _record(check: Check) -> dict[str, Any]:
    numbers = {"error": check.error, "limit": check.limit, "margin": check.margin}
    finite = {name: value if np.isfinite(value) else None for name, value in numbers.items()}
    return {"name": check.name, "passed": check.passed, **finite, "worst": check.worst, "note": check.note}
