"""One measurement beside its rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.tolerance import numbers

# In the place of the worst tensor, where one side raises and the other does not.
THE_CALL = "the call itself"


@dataclass(frozen=True)
class Situation:
    """What both modules are given in one run of a check.

    Args:
        inputs: inputs by name.
        extras: arguments of the call beside the inputs.
        weights: weights by shared name; None are those of the pair.
    """

    inputs: Arrays
    extras: Mapping[str, Any]
    weights: Arrays | None = None


@dataclass(frozen=True)
class Check:
    """One measurement: `error` must be at most `limit`.

    Args:
        name: name of the check.
        error: measured error; infinite where nothing can be compared.
        limit: largest error that passes.
        worst: the tensor with the largest error.
        note: further information, such as parameters without a gradient.
        skipped: reason why the check did not apply; empty where it did.
        nothing: reason why an applicable check had nothing to compare, with the remedy; else empty.
        wanted: whether the check was requested by name, so that it fails if it cannot run.
        errors: error of every tensor, by name.
        where: the worst element of that tensor: index, value in JAX, value in PyTorch.
        covers: what was exercised beside the inputs of the comparison, a short phrase each.
        untested: what applies and was not tested, a short sentence each.
        seen: what both were given where the error is largest; None are the inputs of the pair.
    """

    name: str
    error: float
    limit: float
    worst: str = ""
    note: str = ""
    skipped: str = ""
    wanted: bool = False
    nothing: str = ""
    errors: dict[str, float] = field(default_factory=dict, repr=False)
    where: dict[str, Any] = field(default_factory=dict)
    covers: tuple[str, ...] = ()
    untested: tuple[str, ...] = ()
    seen: Situation | None = field(default=None, repr=False)

    @property
    def raised(self) -> bool:
        """Whether a call of one side raised."""
        return self.worst == THE_CALL

    @property
    def ran(self) -> bool:
        """Whether anything was measured."""
        return not (self.skipped or self.nothing)

    @property
    def passed(self) -> bool:
        """Whether the rule holds, or the check does not apply and was not requested by name.

        NaN never passes, and neither does a check that had nothing to compare.
        """
        if self.ran:
            return bool(self.error <= self.limit)
        return not (self.nothing or self.wanted)

    @property
    def failed(self) -> bool:
        """Whether something was measured, and breaks the rule."""
        return self.ran and not self.passed

    def with_coverage(self, covers: Iterable[str], untested: Iterable[str]) -> Check:
        """Return this check with what was exercised, and what was not tested."""
        return replace(self, covers=tuple(covers), untested=tuple(untested))

    @property
    def missing(self) -> str:
        """Why nothing was measured; empty where something was."""
        if self.nothing:
            return f"nothing was compared: {self.nothing}"
        return self.skipped and f"not run: {self.skipped}"

    @property
    def margin(self) -> float:
        """How many times the error fits into the limit."""
        return self.limit / self.error if self.error else np.inf

    def explain(self) -> str:
        """Return one line: the worst tensor, its error, the rule, and its worst element."""
        if not self.ran:
            return f"{self.name}: {self.missing}"
        worst = f"error {self.error:.3g} at {self.worst!r}, the rule is {self.limit:.0e}"
        where = f"; worst element {self._element()}" if self.where else ""
        note = f" ({self.note})" if self.note else ""
        return f"{self.name}: {worst}{where}{note}"

    def _element(self) -> str:
        flax, torch = self.where["flax"], self.where["torch"]
        text = f"{tuple(self.where['index'])}: flax {flax:.9g}, torch {torch:.9g}"
        if np.isfinite(flax) == np.isfinite(torch):
            return text
        return f"{text}, not finite in {'torch' if np.isfinite(flax) else 'flax'} alone"


def finite(value: Any) -> Any:
    """Return a value for JSON, inside mappings too: infinity and NaN as None, complex as text."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, complex):
        return str(value)
    return None if isinstance(value, float) and not np.isfinite(value) else value


NOTHING = (
    "PyTorch returns no number here that is finite, as for an empty batch, or where a mask that"
    " hides every key makes all of it NaN. Pass inputs for which it returns numbers"
)


def worst_of(
    name: str,
    errors: dict[str, float],
    limit: float,
    note: str = "",
    *,
    flax: Any = None,
    torch: Any = None,
    reference: Any = None,
) -> Check:
    """Return the check of the largest of several errors, and where its tensor is furthest off.

    Where no error breaks the rule because there is no finite number to measure one by, nothing was
    compared, and the check says so.

    Args:
        name: name of the check.
        errors: error of every tensor, by name.
        limit: largest error that passes.
        note: further information.
        flax: arrays of JAX by name, to show the worst element.
        torch: arrays of PyTorch by name, to show the worst element.
        reference: arrays that the errors are relative to, if not `torch`; None without arrays.
    """
    reference = torch if reference is None else reference
    if not errors:
        return Check(name, np.inf, limit, nothing=NOTHING)
    # NaN is worse than any number, and larger than none.
    worst = max(errors, key=lambda key: (np.isnan(errors[key]), errors[key]))
    error = float(errors[worst])
    if error <= limit and reference is not None and not any_finite(reference):
        return Check(name, np.inf, limit, nothing=NOTHING)
    where = {}
    # A gradient may be missing on one side, and then has no worst element.
    if flax and torch and worst in flax and worst in torch:
        where = _where(flax[worst], torch[worst])
    notes = [note, _note_on_missing(errors, reference or {})]
    note = "; ".join(filter(None, notes))
    return Check(name, error, limit, worst, note, errors=errors, where=where)


def worst_output(name: str, ours: Arrays, theirs: Arrays, note: str = "") -> Check:
    """Return the check of the outputs in float64, ours against those of PyTorch."""
    errors = tolerance.relative(ours, theirs)
    return worst_of(name, errors, tolerance.FORWARD, note, flax=ours, torch=theirs)


def _note_on_missing(names: Iterable[str], arrays: Mapping[str, np.ndarray]) -> str:
    """Return which tensors hold no finite number; empty if each holds one."""
    known = [name for name in names if name in arrays]
    without = sorted(name for name in known if not np.isfinite(arrays[name]).any())
    return f"without a finite number to compare: {', '.join(without)}" if without else ""


def any_finite(arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether there is a finite number in any of the arrays."""
    return any(np.isfinite(array).any() for array in arrays.values())


def _where(flax: np.ndarray, torch: np.ndarray) -> dict[str, Any]:
    if flax.shape != torch.shape or not flax.size:
        return {}
    flax = numbers(flax)
    torch = numbers(torch)
    furthest = int(np.argmax(_distance(flax, torch)))
    index = np.unravel_index(furthest, flax.shape)
    return {
        "index": [int(i) for i in index],
        "flax": flax[index].item(),
        "torch": torch[index].item(),
    }


def _distance(flax: np.ndarray, torch: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        distance = np.abs(flax - torch)
    # Not finite in one framework alone is an infinite distance; alike in both is none.
    alike = (flax == torch) | (np.isnan(flax) & np.isnan(torch))
    distance = np.where(np.isnan(distance), np.inf, distance)
    return np.where(alike, 0, distance)
