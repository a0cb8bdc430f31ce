"""The checks in float32, bfloat16 and float16: the rule is PyTorch's own error in the dtype."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import (
    AdapterError,
    Arrays,
    NothingCompared,
    NotRun,
    Result,
    RunSpec,
    Untested,
    is_floating,
)
from flax_attn.parity.below_range import arrays_below_range
from flax_attn.parity.check import NOTHING, Check, any_finite, worst_of
from flax_attn.parity.listed import listed
from flax_attn.parity.pair import Pair
from flax_attn.parity.stress import NAMED, draws

# Relative, of an output or gradient in float64. Tables that are built in float32, and what follows
# from them, are off by less.
DIFFERENT = 1e-3


def lower_dtype(dtype: str, pair: Pair) -> Check:
    """Outputs and gradients in a lower dtype, against PyTorch's own error in it."""
    spec = pair.lower[dtype]
    try:
        theirs = draws(pair, "torch", spec)
    except AdapterError as error:
        raise NotRun(f"the rule is PyTorch's own error, and {error}") from None
    ours = _in_lower_dtype(pair, spec)
    reference = _measurable(pair)
    measured = _finite(reference.outputs, _outputs(theirs))
    measured |= _finite(reference.gradients, _gradients(theirs))
    if not any_finite(reference.arrays):
        raise NothingCompared(NOTHING)
    if not any_finite(measured):
        raise NotRun(
            f"the rule is PyTorch's own error, and nothing that it returns in {dtype} is finite"
        )
    errors = _errors(dtype, ours, theirs, reference)
    notes = []
    untested = list(_overflowing(dtype, measured, reference))
    # Where the modules differ by more than this dtype rounds, no more draws are needed to say so.
    may_be_rounding = _break_the_rule(errors) and not _differ_in_float64(pair, dtype)
    if may_be_rounding:
        # What JAX itself loses in a sum is no difference of the port.
        spec = replace(spec, name=f"{dtype}, sums rounded once", rounded_sums=True)
        ours, as_computed = pair.run("flax", spec), errors
        errors = _errors(dtype, ours, theirs, reference)
        notes = _note_on_sums(dtype, as_computed, errors)
    if may_be_rounding and _break_the_rule(errors):
        # A number that is rounded to the other side of 0 before a ReLU is none, either.
        theirs = _more_draws(pair, dtype, theirs)
        several = draws(pair, "flax", spec, tolerance.MORE_DRAWS)
        errors = tolerance.median([_errors(dtype, draw, theirs, reference) for draw in several])
    if may_be_rounding and _break_the_rule(errors):
        errors, below = _without_below_range(pair, dtype, errors)
        untested += below
    first = theirs[0]
    if set(ours.dtypes.values()) != set(first.dtypes.values()):
        notes.append(f"outputs are {ours.dtypes} in flax and {first.dtypes} in torch")
    arrays = {"flax": ours.arrays, "torch": first.arrays, "reference": measured}
    check = worst_of(dtype, errors, 1.0, "; ".join(notes), **arrays)
    return replace(check, untested=tuple(untested))


def _overflowing(dtype: str, measured: Arrays, reference: Result) -> Iterator[str]:
    """Yield what was not compared, as PyTorch has no finite number there."""
    for kind, arrays in (("outputs", reference.outputs), ("gradients", reference.gradients)):
        names = [name for name in arrays if any_finite({name: arrays[name]})]
        lost = [name for name in names if not any_finite({name: measured[name]})]
        if lost:
            yield f"{dtype}: {len(lost)} of {len(names)} {kind} of PyTorch have no finite number"


def _without_below_range(
    pair: Pair, dtype: str, errors: Mapping[str, float]
) -> tuple[dict[str, float], list[str]]:
    """Return the errors without those that the range of a dtype explains, and what was left out.

    A number that is not finite is never left out. bfloat16 and float32 have another range, and the
    rule holds in them for each rounding that a port has more than PyTorch.
    """
    kept = dict(errors)
    lost = [name for name, error in errors.items() if 1 < error < np.inf]
    where = arrays_below_range(pair, dtype) if dtype == "float16" and lost else ""
    if not where:
        return kept, []
    for name in lost:
        del kept[name]
    if not kept:
        raise Untested(f"the range of {dtype} is left: {where}")
    return kept, [f"{dtype}: {listed(lost, NAMED)}: {where}"]


def _differ_in_float64(pair: Pair, dtype: str) -> bool:
    """Whether outputs or gradients differ in float64 by more than rounding in this dtype makes."""
    reference = pair.reference
    try:
        ours = pair.flax64
        errors = tolerance.relative(ours.outputs, reference.outputs)
        shared = pair.shared(reference.gradients)
        errors |= tolerance.gradient_errors(ours.gradients, shared)
    # One that raises, or outputs of other shapes, are told by other checks.
    except (AdapterError, ValueError):
        return False
    limit = max(float(ml_dtypes.finfo(dtype).eps), DIFFERENT)
    return any(error > limit for error in errors.values())


def _break_the_rule(errors: Mapping[str, float]) -> bool:
    return any(not error <= 1 for error in errors.values())


def _more_draws(pair: Pair, dtype: str, theirs: Sequence[Result]) -> Sequence[Result]:
    try:
        return draws(pair, "torch", pair.lower[dtype], tolerance.MORE_DRAWS)
    except NotRun:
        # An export holds as many as its own comparison made.
        return theirs


def _note_on_sums(
    dtype: str, as_computed: Mapping[str, float], errors: Mapping[str, float]
) -> list[str]:
    """Return a note on the tensors that the sums of JAX alone take out of the rule, if any."""
    found = []
    for name, error in as_computed.items():
        if errors[name] <= 1 < error:
            found.append(f"{error:.3g} of the rule at {name!r}")
    if not found:
        return []
    what = (
        "the gradient of a broadcast, such as a bias, or of a lookup, and the windows of a pool,"
        " and computes its own functions, such as softmax,"
    )
    if dtype == "float32":
        what = "all sums, gradients of convolutions, and products of matrices on a CPU,"
        what = f"{what} and approximates functions such as tanh"
    return [
        f"JAX adds up {what} in {dtype} step by step, which costs {', '.join(found)} and is no"
        " difference of the port: judged with each of these rounded once"
    ]


def _measurable(pair: Pair) -> Result:
    """Return the floating outputs in float64, and the gradients that are more than rounding."""
    reference = pair.reference
    outputs = {name: output for name, output in reference.outputs.items() if is_floating(output)}
    shared = pair.shared(reference.gradients)
    return Result(outputs, {name: g for name, g in shared.items() if name not in pair.null})


def _errors(dtype: str, ours: Result, theirs: Sequence[Result], reference: Result) -> dict:
    judge = partial(tolerance.lower_dtype, eps=float(ml_dtypes.finfo(dtype).eps))
    outputs, gradients = _outputs(theirs), _gradients(theirs)
    errors = judge(ours.outputs, outputs, reference.outputs, tolerance.LOW_FORWARD)
    backward = judge(ours.gradients, gradients, reference.gradients, tolerance.LOW_GRADIENT)
    return errors | backward


def _outputs(draws: Sequence[Result]) -> list[Arrays]:
    return [draw.outputs for draw in draws]


def _gradients(draws: Sequence[Result]) -> list[Arrays]:
    return [draw.gradients for draw in draws]


def _finite(reference: Arrays, theirs: Sequence[Arrays]) -> Arrays:
    """Return the reference, NaN where PyTorch overflows in the lower dtype."""
    asked = tolerance.finite_in_all(theirs, reference)
    return {name: np.where(asked[name], array, np.nan) for name, array in reference.items()}


def _in_lower_dtype(pair: Pair, spec: RunSpec) -> Result:
    # Other adapters than that of JAX name no device.
    on_cpu = getattr(pair.flax, "device", None) is None
    try:
        return pair.run("flax", spec)
    except AdapterError as error:
        if spec.dtype == "float16" and on_cpu and _MISSING_PRODUCT.search(str(error.__cause__)):
            raise Untested(
                f"XLA has no such float16 product on a CPU: {error}. Pass device= to use a GPU"
                " or TPU"
            ) from None
        raise


# Of JAX, which checks some products before it compiles, and of XLA.
_MISSING_PRODUCT = re.compile(
    r"^The precision 'F16\w*' is not supported by dot_general on CPU|^UNIMPLEMENTED:"
    r" (?=.*dot)(?=.*(?<!b)f16)",
    re.IGNORECASE,
)
