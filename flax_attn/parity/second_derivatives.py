"""The check `second`: the derivative of the gradients, in float64."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import AdapterError, Arrays, NotRun
from flax_attn.parity.check import Check, worst_of
from flax_attn.parity.float64_checks import check_numbers
from flax_attn.parity.pair import Pair

NAME = "second"


def second(pair: Pair) -> Check:
    """Derivative of the gradients along a random direction, in float64.

    PyTorch's own may be wrong, as in its fused weight norm. Differences of its gradients are the
    reference then.
    """
    check_numbers(pair, pair.cotangents)
    if not pair.tangents:
        raise NotRun("no parameter is shared and no input is floating")
    theirs = _of_torch(pair)
    ours = pair.run("flax", pair.second).second
    errors = tolerance.gradient_errors(ours, theirs)
    check = worst_of(NAME, errors, tolerance.SECOND, flax=ours, torch=theirs)
    if check.passed or pair.own_torch is None:
        return check
    failing = [name for name, error in errors.items() if not error <= tolerance.SECOND]
    return _by_differences(pair, failing, ours, theirs) or check


def _of_torch(pair: Pair) -> Arrays:
    try:
        theirs = pair.run("torch", pair.second)
    except AdapterError as error:
        raise NotRun(f"PyTorch, the reference, gives no second derivative: {error}") from None
    return pair.shared(theirs.second)


def _by_differences(
    pair: Pair, failing: Collection[str], ours: Arrays, theirs: Arrays
) -> Check | None:
    """Return the check of what fails by differences; None unless PyTorch is what is wrong there."""
    rule = tolerance.DIFFERENCES
    every = _differences(pair)
    largest = tolerance.largest_of(every)
    measured = {name: every[name] for name in failing}
    of_torch = tolerance.relative(theirs, measured, largest)
    if min(of_torch.values()) <= rule:
        return None
    names = ", ".join(sorted(failing))
    note = (
        f"PyTorch's own derivatives of its gradients of {names} are wrong: those of JAX are"
        " compared with differences of PyTorch's gradients"
    )
    errors = tolerance.relative(ours, measured, largest)
    check = worst_of(NAME, errors, rule, note, flax=ours, torch=measured)
    return check if check.passed else None


def _differences(pair: Pair) -> Arrays:
    """Return how PyTorch's gradients change along the tangents, by two of each."""
    before = _gradients(pair, -tolerance.STEP)
    after = _gradients(pair, tolerance.STEP)
    changes = {name: after[name] - before[name] for name in after}
    return {name: change / (2 * tolerance.STEP) for name, change in changes.items()}


def _gradients(pair: Pair, step: float) -> Arrays:
    """Return PyTorch's gradients a step along the tangents from where the parameters are."""
    assert pair.own_torch is not None
    moved = replace(pair.second, step=step)
    return pair.shared(pair.own_torch.run(moved).gradients)
