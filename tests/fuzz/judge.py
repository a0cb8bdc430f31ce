"""When a call is as it has to be: equal by the rules of the judge, or refused by our own words."""

import re
import traceback
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import attn_spec
import flax_attn
import ml_dtypes
import numpy as np
from flax_attn.parity import tolerance

from . import formula
from .formula import Arrays, Options

_OURS = [Path(package.__file__).parent for package in (attn_spec, flax_attn)]
SUMS = {"bias", "sinks"}
OF_SCORES = {"query", "key", *SUMS}
DRAWS = 4 * tolerance.DRAWS  # of thousands of cases, some are unlucky in a few
_LIMITS = {"output": tolerance.LOW_FORWARD, "weights": tolerance.LOW_FORWARD}


class Wrong(Exception):  # noqa: N818 (what a case found)
    """Raised by a case that did not come out as it has to."""


def refused(error: BaseException) -> bool:
    """Return whether an error is a refusal: ours, with the rule, what was given and the remedy."""
    frames = traceback.extract_tb(error.__traceback__)
    raised_by = Path(frames[-1].filename) if frames else Path()
    raised_here = any(raised_by.is_relative_to(folder) for folder in _OURS)
    says = re.search(r"\bgot\b|\bhas\b", str(error)) is not None
    return isinstance(error, ValueError) and raised_here and says


@dataclass(frozen=True)
class Judged:
    """What a call returned, beside what it was given.

    Args:
        dtype: dtype of the call.
        found: output, weights and gradients.
        given: query, key, value, bias and sinks in that dtype.
        cotangent: cotangent of the output, in that dtype.
        options: options of the formula.
        chooses: whether rounding alone makes the gradients of the scores.
    """

    dtype: str
    found: dict
    given: Arrays
    cotangent: np.ndarray
    options: Options
    chooses: bool = False

    def check(self) -> None:
        """Raise `Wrong` unless all of it is right."""
        ours = {name: np.asarray(x) for name, x in self.found.items()}
        for name, x in ours.items():
            if x.dtype.name != self.given.get(name, self.given["query"]).dtype.name:
                raise Wrong(f"{name} has dtype {x.dtype.name}")
        alone = ours.pop("output alone", None)
        if alone is not None and not np.array_equal(alone, ours["output"], equal_nan=True):
            raise Wrong("asking for weights changes the output")
        again = ours.pop("output in a gradient", None)
        if again is not None:
            self._compare({**ours, "output": again})
        if "output" in ours:
            self._compare(ours)

    def _compare(self, ours: Arrays) -> None:
        wide = {name: x.astype(np.float64) for name, x in ours.items()}
        names = [name for name in wide if name in self._defined]
        truth = {name: self.truth[name] for name in names}
        for name in names:
            if wide[name].shape != truth[name].shape:
                raise Wrong(f"{name} has shape {wide[name].shape}, not {truth[name].shape}")
        wide = {name: self._only_defined(name, wide[name]) for name in names}
        truth = {name: self._only_defined(name, truth[name]) for name in names}
        for name in names:
            if not np.array_equal(np.isnan(wide[name]), np.isnan(truth[name])):
                raise Wrong(f"{name} is NaN elsewhere: {_places(wide[name], truth[name])}")
        judged = truth.keys() - (OF_SCORES if self.chooses else set())
        summed = {name for name in judged & OF_SCORES if self._is_by_terms(name)}
        errors = self._by_terms(wide, {name: truth[name] for name in summed})
        rule = self._double if self.dtype == "float64" else self._lower
        errors |= rule(wide, {name: truth[name] for name in judged - summed})
        if errors and not max(errors.values()) <= 1:
            shown = {name: f"{error:.3g}" for name, error in errors.items()}
            raise Wrong(f"errors over those allowed: {shown}")

    @cached_property
    def truth(self) -> Arrays:
        wide = {name: x.astype(np.float64) for name, x in self.given.items()}
        with np.errstate(all="ignore"):
            return formula.attention(wide, self.options, self.cotangent.astype(np.float64))

    @cached_property
    def _defined(self) -> dict[str, np.ndarray]:
        undefined = formula.not_finite(self.given, self.options)
        whole = {name: np.ones((), bool) for name in ("output", "weights")}
        if not any(x.any() for x in undefined.values()):
            sinks = self.given.get("sinks", np.zeros(1))
            names = self.given.keys() - ({"sinks"} if not (sinks < np.inf).all() else set())
            return whole | {name: np.ones((), bool) for name in names}
        # A row that is NaN may turn to NaN what it could have read: what stands by rows is judged.
        return whole | {"query": ~undefined["query"]}

    def _only_defined(self, name: str, x: np.ndarray) -> np.ndarray:
        where = self._defined[name]
        return x if where.ndim == 0 else np.where(where[..., None], x, 0)

    def _is_by_terms(self, name: str) -> bool:
        """Return whether a gradient is measured by its terms, of which it may be rounding."""
        if self.dtype == "float64" or name in SUMS:
            return True
        truth = self._only_defined(name, self.truth[name])
        return _largest(truth) <= tolerance.NULL * self._largest_term(name)

    def _largest_term(self, name: str) -> float:
        return _largest(self._only_defined(name, self.truth[f"terms of {name}"]))

    def _by_terms(self, ours: Arrays, truth: Arrays) -> dict[str, float]:
        """Return the errors of gradients whose terms may cancel, over those allowed."""
        eps = float(ml_dtypes.finfo(self.dtype).eps)
        limit = tolerance.GRADIENT if self.dtype == "float64" else tolerance.REORDERED * eps
        errors = {}
        for name in truth:
            found = tolerance.relative(ours, {name: truth[name]}, self._largest_term(name))
            errors[name] = found[name] / limit
        return errors

    def _double(self, ours: Arrays, truth: Arrays) -> dict[str, float]:
        errors = tolerance.relative(ours, truth)
        limits = dict.fromkeys(_LIMITS, tolerance.FORWARD)
        return {name: x / limits.get(name, tolerance.GRADIENT) for name, x in errors.items()}

    def _lower(self, ours: Arrays, truth: Arrays) -> dict[str, float]:
        eps = float(ml_dtypes.finfo(self.dtype).eps)
        plain = [{name: self._only_defined(name, x[name]) for name in truth} for x in self._plain]
        errors = {}
        for name, x in truth.items():
            factor = _LIMITS.get(name, tolerance.LOW_GRADIENT)
            errors |= tolerance.lower_dtype(ours, plain, {name: x}, factor, eps)
        return errors

    @cached_property
    def _plain(self) -> list[Arrays]:
        """The formula in the dtype of the call, in two orders, of numbers beside those given."""
        rng = np.random.default_rng(0)
        low = self.given["query"].dtype
        cotangent = self.cotangent.astype(np.float32)
        draws = []
        for number in range(DRAWS):
            near = {name: _nudged(rng, x) if number else x for name, x in self.given.items()}
            product = formula.one_after_another if number % 2 else np.matmul
            wide = {name: x.astype(np.float32) for name, x in near.items()}
            with np.errstate(all="ignore"):
                found = formula.attention(wide, self.options, cotangent, product)
                rounded = {name: x.astype(low).astype(np.float64) for name, x in found.items()}
            draws.append(rounded)
        return draws


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0.0))


def _nudged(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """Return numbers that would be rounded to these, rounded up or down at random."""
    half_step = ml_dtypes.finfo(x.dtype).eps / 2
    nudge = rng.choice([-1, 0, 1], size=x.shape) * float(half_step)
    return (x.astype(np.float64) * (1 + nudge)).astype(np.float32)


def _places(ours: np.ndarray, truth: np.ndarray) -> str:
    more, less = np.isnan(ours) & ~np.isnan(truth), np.isnan(truth) & ~np.isnan(ours)
    first, other = (np.argwhere(x)[:2].tolist() for x in (more, less))
    return f"NaN for a number at {first}, a number for NaN at {other}"
