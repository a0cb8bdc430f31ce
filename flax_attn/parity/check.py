"""One measurement beside its rule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Check:
    """One measurement: `error` must be at most `limit`.

    Args:
        name: of the check.
        error: what was measured; infinite where nothing can be compared.
        limit: the rule.
        worst: the tensor with the largest error.
        note: further information, such as parameters without a gradient.
        skipped: why nothing was measured; empty where something was.
        wanted: whether the check was requested by name, so that it fails if it cannot run.
        errors: of every tensor, by name.
        where: the worst element of that tensor: index, value in JAX, value in PyTorch.
    """

    name: str
    error: float
    limit: float
    worst: str = ""
    note: str = ""
    skipped: str = ""
    wanted: bool = False
    errors: dict[str, float] = field(default_factory=dict, repr=False)
    where: dict[str, Any] = field(default_factory=dict)

    @property
    def ran(self) -> bool:
        """Whether anything was measured."""
        return not self.skipped

    @property
    def passed(self) -> bool:
        """Whether the rule holds, or the check did not run and was not requested by name; NaN never passes."""
        return bool(self.error <= self.limit) if self.ran else not self.wanted

    @property
    def margin(self) -> float:
        """How many times the error fits into the limit."""
        return self.limit / self.error if self.error else np.inf

    def explain(self) -> str:
        """Return one line: the worst tensor, its error, the rule, and its worst element."""
        if not self.ran:
            return f"{self.name}: not run: {self.skipped}"
        line = f"{self.name}: error {self.error:.3g} at {self.worst!r}, the rule is {self.limit:.0e}"
        if self.where:
            index, flax, torch = (self.where[key] for key in ("index", "flax", "torch"))
            line += f"; worst element {tuple(index)}: flax {flax:.9g}, torch {torch:.9g}"
            if np.isfinite(flax) != np.isfinite(torch):
                line += f", not finite in {'torch' if np.isfinite(flax) else 'flax'} alone"
        return f"{line} ({self.note})" if self.note else line


def finite(value: Any) -> Any:
    """Return a value for JSON, where infinity and NaN become None, inside mappings too."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not np.isfinite(value) else value


def worst_of(
    name: str,
    errors: dict[str, float],
    limit: float,
    note: str = "",
    *,
    flax: Any = None,
    torch: Any = None,
) -> Check:
    """Return the check of the largest of several errors, and where its tensor is furthest off."""
    if not errors:
        return Check(name, np.inf, limit, skipped="there is nothing to compare")
    worst = max(errors, key=lambda key: (np.isnan(errors[key]), errors[key]))
    where = _where(flax[worst], torch[worst]) if flax and torch and worst in flax and worst in torch else {}
    return Check(name, float(errors[worst]), limit, worst, note, errors=errors, where=where)


def _where(flax: np.ndarray, torch: np.ndarray) -> dict[str, Any]:
    if flax.shape != torch.shape or not flax.size:
        return {}
    with np.errstate(invalid="ignore"):
        distance = np.abs(np.asarray(flax - torch, np.float64))
    # Not finite in one framework alone is an infinite distance; alike in both is none.
    distance = np.where(
        np.isnan(distance), np.where((flax == torch) | (np.isnan(flax) & np.isnan(torch)), 0, np.inf), distance
    )
    index = np.unravel_index(int(np.argmax(distance)), flax.shape)
    return {"index": [int(i) for i in index], "flax": float(flax[index]), "torch": float(torch[index])}
