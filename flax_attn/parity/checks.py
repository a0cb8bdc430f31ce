"""The checks of a pair, the fastest first. Each returns what it measured beside its rule.

A check that does not apply to a pair raises `NotRun` with the reason, which becomes a line in the
report.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import ml_dtypes
import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import (
    AdapterError,
    BothRaise,
    NothingCompared,
    NotRun,
    PairingError,
    Result,
    RunSpec,
    is_floating,
)
from flax_attn.parity.check import NOTHING, Check, any_finite, worst_of
from flax_attn.parity.pair import LOWER, Pair
from flax_attn.parity.stress import STRESS_INPUTS, draws, stress
from flax_attn.parity.training import check_choice


def shapes(pair: Pair) -> Check:
    """Names, shapes and dtypes of the outputs."""
    ours, theirs = pair.run("flax", pair.uncompiled), pair.plain
    names = [*theirs.outputs, *(name for name in ours.outputs if name not in theirs.outputs)]
    seen = {name: (_described(ours, name), _described(theirs, name)) for name in names}
    errors = {
        f"{name}: flax {left}, torch {right}": float(left != right)
        for name, (left, right) in seen.items()
    }
    return worst_of("shapes", errors, 0.0)


def weights(pair: Pair) -> Check:
    """Check coverage and round trip: every numbered element is converted and found exactly once."""
    if not pair.has_parameters:
        raise NotRun("there are no parameters")
    if not pair.shares_weights:
        raise NotRun("without a layout it is not known which parameter is which")
    return worst_of("weights", dict(_probe(pair)), 0.0)


def _probe(pair: Pair) -> Iterator[tuple[str, float]]:
    start, elements = 1, []
    for entry in pair.entries:
        size = int(np.prod(entry.shape))
        numbers = np.arange(start, start + size).reshape(entry.shape)
        parts = entry.split(numbers)
        again = entry.join(parts)
        yield (
            entry.theirs,
            float((again != numbers).sum()) if again.shape == numbers.shape else np.inf,
        )
        elements += [np.ravel(part) for part in parts.values()]
        start += size
    found = np.sort(np.concatenate(elements)) if elements else np.arange(0)
    yield (
        "every element once",
        float((found != np.arange(1, start)).sum()) if len(found) == start - 1 else np.inf,
    )


def forward(pair: Pair) -> Check:
    """Outputs in float64."""
    try:
        ours, theirs = pair.both(pair.float64)
    except BothRaise as error:  # every pair has outputs, so this check applies to each
        raise NothingCompared(f"{error}. Pass inputs that both can be differentiated on") from None
    errors = tolerance.relative(ours.outputs, theirs.outputs)
    arrays = {"flax": ours.outputs, "torch": theirs.outputs}
    check = worst_of("forward", errors, tolerance.FORWARD, _low(ours), **arrays)
    if check.passed and _only_zeros(theirs):
        raise NothingCompared(
            "both sides return 0 everywhere, and all gradients are 0, as where a mask hides every"
            " key. Pass inputs, or extras such as lengths, for which PyTorch returns other numbers"
        )
    return check


def _only_zeros(result: Result) -> bool:
    floating = all(is_floating(output) for output in result.outputs.values())
    arrays = [*result.outputs.values(), *result.gradients.values()]
    return floating and not any(np.any(array) for array in arrays)


def _low(result: Result) -> str:
    low = [f"{name} is {kind}" for name, kind in result.dtypes.items() if kind in LOWER]
    if not low:
        return ""
    return (
        f"{', '.join(low)} for inputs and parameters in float64: construct the Flax module without"
        " dtype=, or, if its dtype is fixed at construction, run `flax-attn parity"
        " pkg.mod:flax_factory pkg.mod:torch_factory`, which enables x64 before either is"
        " constructed"
    )


def gradients(pair: Pair) -> Check:
    """Compare float64 gradients of shared parameters and floating inputs for random cotangents."""
    _check_numbers(pair, pair.cotangents)
    ours, theirs = pair.both(pair.float64)
    reference = pair.shared(theirs.gradients)
    if not reference:
        raise NotRun("no parameter is shared and no input is floating")
    null = _without_effect(ours.gradients, reference)
    notes = [f"no effect on the outputs: {', '.join(null)}"] if null else []
    notes += (
        ["parameters are not shared: inputs only"]
        if pair.has_parameters and not pair.shares_weights
        else []
    )
    errors = tolerance.gradient_errors(ours.gradients, reference)
    return worst_of(
        "gradients",
        errors,
        tolerance.GRADIENT,
        "; ".join(notes),
        flax=ours.gradients,
        torch=reference,
    )


def _check_numbers(pair: Pair, names: Iterable[str]) -> None:
    """Raise where what is differentiated holds no number: all gradients of nothing are 0."""
    if not any_finite({name: pair.plain.outputs[name] for name in names}):
        raise NothingCompared(NOTHING)


def _without_effect(
    ours: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]
) -> list[str]:
    null = tolerance.null_directions(reference)
    masks = {
        name: m
        for name, m in tolerance.nonzero_gradient(ours, reference).items()
        if name not in null
    }
    partly = [
        f"{(~mask).sum()} of {mask.size} elements of {name}"
        for name, mask in masks.items()
        if not mask.all()
    ]
    return sorted(null) + partly


def second(pair: Pair) -> Check:
    """Derivative of the gradients along a random direction, in float64."""
    _check_numbers(pair, pair.cotangents)
    spec = pair.run_spec("second", cotangents=pair.cotangents, tangents=pair.tangents)
    if not pair.tangents:
        raise NotRun("no parameter is shared and no input is floating")
    ours, theirs = pair.both(spec)
    reference = pair.shared(theirs.second)
    errors = tolerance.gradient_errors(ours.second, reference)
    return worst_of("second", errors, tolerance.SECOND, flax=ours.second, torch=reference)


def lower(dtype: str, pair: Pair) -> Check:
    """Outputs and gradients in a lower dtype, against PyTorch's own error in it."""
    spec = pair.lower[dtype]
    try:
        theirs = draws(pair, "torch", spec)
    except AdapterError as error:
        raise NotRun(f"the rule is PyTorch's own error, and {error}") from None
    ours = _in_lower_dtype(pair, spec)
    reference, eps = pair.reference, float(ml_dtypes.finfo(dtype).eps)
    outputs = {name: output for name, output in reference.outputs.items() if is_floating(output)}
    gradients = {
        name: g for name, g in pair.shared(reference.gradients).items() if name not in pair.null
    }
    forward, backward = (
        [getattr(draw, kind) for draw in theirs] for kind in ("outputs", "gradients")
    )
    measured = _measured(forward, outputs) | _measured(backward, gradients)
    if not any_finite({**outputs, **gradients}):
        raise NothingCompared(NOTHING)
    if not any_finite(measured):
        raise NotRun(
            f"the rule is PyTorch's own error, and nothing that it returns in {dtype} is finite"
        )

    def errors_of(ours: Result) -> dict[str, float]:
        errors = tolerance.lower_dtype(ours.outputs, forward, outputs, tolerance.LOW_FORWARD, eps)
        return errors | tolerance.lower_dtype(
            ours.gradients, backward, gradients, tolerance.LOW_GRADIENT, eps
        )

    errors = errors_of(ours)
    if not max(errors.values(), default=0.0) <= 1:  # which one rounding alone may do
        errors = tolerance.median([errors_of(draw) for draw in draws(pair, "flax", spec)])
    differ = set(ours.dtypes.values()) != set(theirs[0].dtypes.values())
    note = f"outputs are {ours.dtypes} in flax and {theirs[0].dtypes} in torch" if differ else ""
    flax, torch = ({**result.outputs, **result.gradients} for result in (ours, theirs[0]))
    return worst_of(dtype, errors, 1.0, note, flax=flax, torch=torch, reference=measured)


def _measured(
    theirs: Sequence[Mapping[str, np.ndarray]], reference: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the reference, NaN where PyTorch overflows in the lower dtype."""
    asked = tolerance.finite_in_all(theirs, reference)
    return {name: np.where(asked[name], array, np.nan) for name, array in reference.items()}


def _in_lower_dtype(pair: Pair, spec: RunSpec) -> Result:
    on_cpu = getattr(pair.flax, "device", None) is None
    try:
        return pair.run("flax", spec)
    except AdapterError as error:
        if spec.dtype == "float16" and on_cpu and _MISSING_PRODUCT.search(str(error.__cause__)):
            raise NotRun(
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


def eager(pair: Pair) -> Check:
    """Compiled and eager execution in JAX."""
    outputs = pair.run("flax", pair.uncompiled).outputs
    reference = pair.flax64.outputs
    errors = tolerance.relative(outputs, reference)
    return worst_of("jit = eager", errors, tolerance.FORWARD, reference=reference)


def dropout(pair: Pair) -> Check:
    """Outputs and gradients in train mode, with the same dropout key in both."""
    if not pair.takes("dropout_key"):
        raise NotRun(
            "the calls take no dropout_key, so they cannot be made to drop the same elements"
        )
    ours, theirs = pair.both(pair.training())
    if all(
        np.array_equal(theirs.outputs[name], pair.plain.outputs[name], equal_nan=True)
        for name in theirs.outputs
    ):
        raise NotRun("nothing is dropped: train mode returns what eval mode does")
    errors = tolerance.relative(ours.outputs, theirs.outputs)
    errors |= tolerance.gradient_errors(ours.gradients, pair.shared(theirs.gradients))
    flax, torch = ({**result.outputs, **result.gradients} for result in (ours, theirs))
    return worst_of("dropout", errors, tolerance.GRADIENT, flax=flax, torch=torch)


def unbatched(pair: Pair) -> Check:
    """Inputs without the batch axis, against the first row of the batch."""
    sizes = {len(x) for x in pair.inputs.values() if x.ndim}
    if len(sizes) != 1 or pair.extras:
        raise NotRun("the inputs have no batch axis in common")
    if sizes == {0}:
        raise NothingCompared(NOTHING)
    try:
        ours, theirs = pair.both(
            pair.run_spec("unbatched", inputs={name: x[0] for name, x in pair.inputs.items()})
        )
    except AdapterError as error:
        raise NotRun(f"one of the calls takes batches only: {error}") from None
    with_rows = {
        name: output for name, output in pair.plain.outputs.items() if output.ndim and len(output)
    }
    rows = {name: np.asarray(output[0]) for name, output in with_rows.items()}
    if max(tolerance.relative(theirs.outputs, rows).values(), default=np.inf) > tolerance.FORWARD:
        raise NotRun("PyTorch takes the first axis of any input as a batch")
    errors = tolerance.relative(ours.outputs, theirs.outputs)
    return worst_of("unbatched", errors, tolerance.FORWARD, reference=theirs.outputs)


def cache(pair: Pair) -> Check:
    """Outputs computed in steps with a cache, against all at once."""
    cached = [framework for framework in ("flax", "torch") if getattr(pair, framework).has_cache]
    if not cached:
        raise NotRun("no call computes in steps: pass flax_cached or torch_cached")
    reference, errors = pair.plain.outputs, {}
    for framework in cached:
        outputs = pair.run(framework, pair.run_spec("cached", cached=True)).outputs
        errors |= {
            f"{framework}: {name}": error
            for name, error in tolerance.relative(outputs, reference).items()
        }
    return worst_of("cache = full", errors, tolerance.FORWARD, reference=reference)


def training(pair: Pair) -> Check:
    """Losses and parameters over the steps of the recipe in float64."""
    if not pair.has_parameters:
        raise NotRun("there are no parameters")
    if not pair.shares_weights:
        raise NotRun("without a layout it is not known which parameter is which")
    _check_numbers(pair, [pair.training_spec().output])
    # A parameter without effect moves by rounding only, which Adam scales up to a full step.
    nonzero_gradient = tolerance.nonzero_gradient(
        pair.flax64.gradients, pair.shared(pair.reference.gradients)
    )
    ours, reference = (
        {
            name: np.where(nonzero_gradient.get(name, True), value, 0.0)
            for name, value in arrays.items()
        }
        for arrays in pair.trained
    )
    reference = {name: value for name, value in reference.items() if name not in pair.null}
    errors = tolerance.relative(ours, reference)
    return worst_of("training", errors, tolerance.TRAINING, flax=ours, torch=reference)


def _described(result: Result, name: str) -> str:
    return (
        f"{result.dtypes[name]}{list(result.outputs[name].shape)}"
        if name in result.outputs
        else "nothing"
    )


#: The checks of a comparison by name, in the order in which they run.
CHECKS: dict[str, Callable[[Pair], Check]] = {
    "shapes": shapes,
    "weights": weights,
    "forward": forward,
    "gradients": gradients,
    "second": second,
    **{dtype: partial(lower, dtype) for dtype in LOWER},
    "jit = eager": eager,
    "dropout": dropout,
    "unbatched": unbatched,
    "cache = full": cache,
    **{name: partial(stress, name) for name in STRESS_INPUTS},
    "training": training,
}


def run_checks(
    pair: Pair,
    names: Sequence[str] | None = None,
    wanted: bool = True,
    watch: Callable[[str], None] = lambda name: None,
) -> Iterator[Check]:
    """Yield the checks one by one; a check that does not apply comes with the reason.

    Args:
        pair: pair of modules to check.
        names: names from `CHECKS`; None is all.
        wanted: whether a check in `names` that does not apply is a failure.
        watch: function called with the name of each check before it runs.

    Raises:
        ValueError: if a name is unknown.
        PairingError: if one of the modules cannot be run at all.
    """
    for name in names or ():
        check_choice("check", name, CHECKS)
    return _run_checks(pair, names, wanted, watch)


def _run_checks(
    pair: Pair, names: Sequence[str] | None, wanted: bool, watch: Callable[[str], None]
) -> Iterator[Check]:
    for name in CHECKS if names is None else names:
        watch(name)
        try:
            yield CHECKS[name](pair)
        except NotRun as reason:
            yield Check(name, np.inf, 0.0, skipped=str(reason), wanted=wanted and names is not None)
        except NothingCompared as reason:
            yield Check(name, np.inf, 0.0, nothing=str(reason))
        except AdapterError as error:
            if isinstance(error.__cause__, PairingError):
                raise error.__cause__ from None
            yield Check(name, np.inf, 0.0, worst="the call itself", note=str(error))
