"""The check of train mode without dropout, and of the running statistics that it updates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Any

import numpy as np
from flax import nnx

from flax_attn.convert.api import naming
from flax_attn.convert.entry import Entry
from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import (
    AdapterError,
    Arrays,
    NotRun,
    Result,
    RunSpec,
    Untested,
    kept_name,
)
from flax_attn.parity.check import Check, worst_of
from flax_attn.parity.pair import Pair
from flax_attn.parity.variations import gradients_over_rule, outputs_over_rule

NAME = "running statistics"
# Largest spread of a ratio of two updates that is one number.
SPREAD = 1e-9


def running_statistics(pair: Pair) -> Check:
    """Outputs, gradients and running statistics in train mode with dropout off.

    After one call, and after a second one on other inputs. PyTorch divides the variance that it
    keeps by n - 1, `nnx.BatchNorm` by n: that difference is named, and is no fault of the port.
    """
    spec = _spec(pair)
    theirs = _of_torch(pair, spec)
    ours = _of_flax(pair, spec)
    factors = dict(_factors(pair, ours.outputs, theirs.outputs))
    left_out = factors.keys() | (theirs.outputs.keys() - ours.outputs.keys())
    errors = _over_rule(ours, theirs, left_out)
    second = _of_two_calls(pair, spec, left_out)
    # What one call shows is not said again of two.
    if tolerance.within(errors, 1.0):
        errors |= second
    errors |= gradients_over_rule(pair, ours, theirs)
    note = "; ".join(_rates(pair, ours.outputs, theirs.outputs))
    check = worst_of(NAME, errors, 1.0, note, flax=ours.arrays, torch=theirs.arrays)
    untested = [*_unbiased(factors), *_not_kept(ours, theirs)]
    return check.with_coverage(["train mode without dropout"], untested)


def _spec(pair: Pair) -> RunSpec:
    extras = dict(pair.extras)
    # Whoever takes a key drops the same elements on both sides.
    if pair.takes("dropout_key"):
        extras["dropout_key"] = pair.key
    cotangents = pair.possible_cotangents
    return pair.run_spec(NAME, mode="statistics", extras=extras, cotangents=cotangents)


def _of_torch(pair: Pair, spec: RunSpec) -> Result:
    try:
        theirs = pair.run("torch", spec)
    # One row has no batch statistics: in train mode PyTorch refuses it.
    except AdapterError as error:
        raise Untested(f"train mode: {error}") from None
    if not _has_changed(pair, theirs, pair.plain.outputs):
        raise NotRun("dropout aside, train mode of PyTorch changes nothing")
    return theirs


def _of_flax(pair: Pair, spec: RunSpec) -> Result:
    module = _nnx_module(pair)
    ours = pair.run("flax", spec)
    if _has_changed(pair, ours, pair.flax64.outputs):
        return ours
    raise _unchanged(module)


def _nnx_module(pair: Pair) -> nnx.Module:
    module = getattr(pair.flax, "module", None)
    if not isinstance(module, nnx.Module):
        raise Untested(f"train mode of PyTorch: the {type(module).__name__} of JAX has no .train()")
    return module


def _unchanged(module: nnx.Module) -> Untested:
    said = "train mode changes what PyTorch returns or keeps, and nothing in JAX"
    if any(hasattr(layer, "use_running_average") for _, layer in nnx.iter_modules(module)):
        said += ". Pass a call that leaves the mode to .train(), which sets use_running_average"
    return Untested(said)


def _has_changed(pair: Pair, result: Result, outputs: Arrays) -> bool:
    """Whether train mode changes an output or a running statistic by more than rounding."""
    before = dict(outputs)
    before |= {kept_name(name): array for name, array in pair.weights.items()}
    common = {name: before[name] for name in result.outputs if name in before}
    errors = tolerance.relative(result.outputs, common)
    return not tolerance.within(errors, tolerance.FORWARD)


def _over_rule(ours: Result, theirs: Result, left_out: Set[str]) -> dict[str, float]:
    reference = {name: array for name, array in theirs.outputs.items() if name not in left_out}
    return outputs_over_rule(ours.outputs, reference)


def _of_two_calls(pair: Pair, spec: RunSpec, left_out: Set[str]) -> dict[str, float]:
    """Return the errors after a second call, which shows an average of another kind."""
    twice = replace(spec, name=f"{NAME}, twice", before=pair.halved, cotangents=None, eager=True)
    ours, theirs = pair.both(twice)
    errors = _over_rule(ours, theirs, left_out)
    return {f"{name}, of two calls": error for name, error in errors.items()}


def _factors(pair: Pair, ours: Arrays, theirs: Arrays) -> Iterator[tuple[str, float]]:
    """Yield n / (n - 1) for each running variance of `nnx.BatchNorm` that differs by only that."""
    momenta = _momenta(getattr(pair.flax, "module", None))
    for entry in _kept_by_both(pair, ours, theirs):
        momentum = momenta.get(entry.ours[0])
        if momentum is None:
            continue
        name = kept_name(entry.theirs)
        old = momentum * pair.weights[entry.theirs]
        factor = _ratio(theirs[name] - old, ours[name] - old)
        if factor > 1 and _is_whole(factor / (factor - 1)):
            yield name, factor


def _kept_by_both(pair: Pair, ours: Arrays, theirs: Arrays) -> Iterator[Entry]:
    for entry in pair.entries:
        name = kept_name(entry.theirs)
        if name in ours and name in theirs:
            yield entry


def _momenta(module: Any) -> dict[str, float]:
    """Return the momentum of each `nnx.BatchNorm`, by the name of its running variance."""
    found = {}
    names = naming(module)
    for path, layer in nnx.iter_modules(module):
        # A layer derived from it may divide by what it likes.
        if type(layer) is nnx.BatchNorm:
            found |= dict.fromkeys(names((*path, "var")), layer.momentum)
    return found


def _is_whole(count: float) -> bool:
    # The error of n / (n - 1) grows by n**2 in n.
    return abs(count - round(count)) < SPREAD * count**2


def _ratio(first: np.ndarray, second: np.ndarray) -> float:
    """Return the ratio of two updates if it is the same in all channels, else 0.

    Example:
        >>> _ratio(np.array([2.5, 5.0]), np.array([2.0, 4.0]))
        1.25
    """
    if first.shape != second.shape or not second.size or not second.all():
        return 0.0
    ratios = first / second
    middle = float(np.median(ratios))
    return middle if np.ptp(ratios) <= SPREAD * abs(middle) else 0.0


def _rates(pair: Pair, ours: Arrays, theirs: Arrays) -> Iterator[str]:
    """Yield how much further JAX moves each running mean, where it moves it the same way."""
    for entry in _kept_by_both(pair, ours, theirs):
        statistic = entry.theirs
        if not statistic.endswith("mean"):
            continue
        name = kept_name(statistic)
        old = pair.weights[statistic]
        moved = ours[name] - old
        expected = theirs[name] - old
        rate = _ratio(moved, expected)
        # A ratio of 0 says that the channels have none in common.
        if rate and abs(rate - 1) > SPREAD:
            yield (
                f"JAX moves {statistic} {rate:.4g} times as far as PyTorch: momentum in Flax is"
                " 1 - momentum in PyTorch"
            )


def _unbiased(factors: dict[str, float]) -> Iterator[str]:
    """Yield the running variances that differ by a factor, those of one factor together."""
    together = defaultdict(list)
    for name, factor in factors.items():
        statistic = _own_name(name)
        together[f"{factor:.4g}"].append(statistic)
    for factor, statistics in together.items():
        yield (
            f"{', '.join(statistics)} as equal: nnx.BatchNorm divides the variance of a batch by n,"
            f" PyTorch by n - 1, so PyTorch adds {factor} times as much here; no argument changes"
            " that"
        )


def _not_kept(ours: Result, theirs: Result) -> Iterator[str]:
    """Yield the statistics that PyTorch keeps, and JAX does not share."""
    missing = [name for name in theirs.outputs if name not in ours.outputs]
    if missing:
        statistics = ", ".join(map(_own_name, missing))
        yield f"updates of {statistics}: what JAX keeps for them is not known"


def _own_name(kept: str) -> str:
    """Return the name of a running statistic, which is an output by another one."""
    return kept.removesuffix(kept_name(""))
