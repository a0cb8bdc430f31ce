"""Derive the verdict from the measurements, in plain Python that a test can repeat."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

LIMITS = {"outputs": 1e-12, "gradients": 1e-11}  # in float64
# Largest allowed difference, in multiples of the change on the PyTorch side when all inputs and
# weights are rounded once.
ROUNDINGS = 16
FLOAT32 = 2.0**-23  # below a rounding of float32 nothing is seen in float32
ORDINARY = ("plain", "padding")  # inputs; on others float32 may lose more than it does here
EMPTY = "a row of padding"


def verdict(record: Mapping[str, Any]) -> str:
    """Return the verdict on a port, in the words of the harness."""
    for words in ("other parameters", "Flax raises", "does not run"):
        if words in record:
            return words
    plain, widened = record["measures"], record.get("widened")
    found = _equality(plain)
    if found != "different":
        return found
    if widened and _equality(widened) != "different":
        return "equal up to float32"
    small = all(
        _below(m) if m["inputs"] in ORDINARY else holds(m) for m in plain if m["inputs"] != EMPTY
    )
    return "equal up to float32" if small else "different"


def _equality(measures: Sequence[Mapping[str, Any]]) -> str:
    failed = {m["inputs"] for m in measures if not holds(m)}
    if failed - {EMPTY}:
        return "different"
    return "differs in empty rows" if failed else "equal"


def holds(measure: Mapping[str, Any]) -> bool:
    """Whether both sides are equal in float64 on some inputs."""
    return "raises" not in measure and all(
        number(measure[kind]) <= max(limit, ROUNDINGS * number(measure["rounding"][kind]))
        for kind, limit in LIMITS.items()
    )


def _below(measure: Mapping[str, Any]) -> bool:
    return "raises" not in measure and all(number(measure[kind]) <= FLOAT32 for kind in LIMITS)


def number(error: float | None) -> float:
    """Return an error as JSON keeps it."""
    return math.inf if error is None else error


def differs(record: Mapping[str, Any]) -> bool:
    """Whether something was measured that is not equal."""
    return "measures" in record and _equality(record["measures"]) == "different"
