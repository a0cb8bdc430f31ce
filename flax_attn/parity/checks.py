"""The checks of a pair, from the cheapest to the dearest. Each returns what it measured beside its rule.

A check that says nothing about a pair raises `NotRun` with the reason, which becomes a line in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np

from flax_attn.functional.checks import check_choice
from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import PairingError, Result, is_floating
from flax_attn.parity.check import Check, worst_of
from flax_attn.parity.pair import LOWER, AdapterError, NotRun, Pair
from flax_attn.parity.stress import STRESS_INPUTS


def shapes(pair: Pair) -> Check:
    """Names, shapes and dtypes of the outputs."""
    ours, theirs = pair.run("flax", pair.uncompiled), pair.plain
    names = [*theirs.outputs, *(name for name in ours.outputs if name not in theirs.outputs)]
    seen = {name: (_described(ours, name), _described(theirs, name)) for name in names}
    errors = {f"{name}: flax {left}, torch {right}": float(left != right) for name, (left, right) in seen.items()}
    return worst_of("shapes", errors, 0.0)


def weights(pair: Pair) -> Check:
    """Coverage, round trip, and an index probe: every element is numbered, crosses, comes back, and is there once."""
    if not pair.has_parameters:
        raise NotRun("there are no parameters")
    if not pair.shares_weights:
        raise NotRun("no layout says which parameter is which; both keep their own")
    return worst_of("weights", dict(_probe(pair)), 0.0)


def _probe(pair: Pair) -> Iterator[tuple[str, float]]:
    start, held = 1, []
    for entry in pair.entries:
        size = int(np.prod(entry.shape))
        numbers = np.arange(start, start + size).reshape(entry.shape)
        parts = entry.split(numbers)
        again = entry.join(parts)
        yield entry.theirs, float((again != numbers).sum()) if again.shape == numbers.shape else np.inf
        held += [np.ravel(part) for part in parts.values()]
        start += size
    found = np.sort(np.concatenate(held)) if held else np.arange(0)
    yield "every element once", float((found != np.arange(1, start)).sum()) if len(found) == start - 1 else np.inf


def forward(pair: Pair) -> Check:
    """Outputs in float64."""
    ours, theirs = pair.both(pair.float64)
    errors = tolerance.relative(ours.outputs, theirs.outputs)
    return worst_of("forward", errors, tolerance.FORWARD, _low(ours), flax=ours.outputs, torch=theirs.outputs)


def _low(result: Result) -> str:
    low = [f"{name} is {kind}" for name, kind in result.dtypes.items() if kind in LOWER]
    if not low:
        return ""
    return (
        f"{', '.join(low)} for inputs and parameters in float64: build the Flax side without dtype=, or, where its "
        "dtype is that of the moment it is built, run `flax-attn parity pkg.mod:flax_factory pkg.mod:torch_factory`, "
        "which enables x64 before either is built"
    )


def gradients(pair: Pair) -> Check:
    """Gradients of every shared parameter and floating input in float64, under random cotangents."""
    ours, theirs = pair.both(pair.float64)
    reference = _shared(pair, theirs.gradients)
    if not reference:
        raise NotRun("no parameter is shared and no input is floating")
    null = _unfelt(ours.gradients, reference)
    notes = [f"does not feel {', '.join(null)}"] if null else []
    notes += ["parameters are not shared: inputs alone"] if pair.has_parameters and not pair.shares_weights else []
    errors = tolerance.gradient_errors(ours.gradients, reference)
    return worst_of("gradients", errors, tolerance.GRADIENT, "; ".join(notes), flax=ours.gradients, torch=reference)


def _unfelt(ours, reference) -> list[str]:
    null = tolerance.null_directions(reference)
    parts = {
        name: nonzero_gradient
        for name, nonzero_gradient in tolerance.nonzero_gradient(ours, reference).items()
        if name not in null and not nonzero_gradient.all()
    }
    return sorted(null) + [
        f"{(~nonzero_gradient).sum()} of {nonzero_gradient.size} elements of {name}"
        for name, nonzero_gradient in parts.items()
    ]


def second(pair: Pair) -> Check:
    """Derivative of the gradients along a random direction, in float64."""
    spec = pair.run_spec("second", cotangents=pair.cotangents, tangents=pair.tangents)
    if not pair.tangents:
        raise NotRun("no parameter is shared and no input is floating")
    ours, theirs = pair.both(spec)
    errors = tolerance.gradient_errors(ours.second, _shared(pair, theirs.second))
    return worst_of("second", errors, tolerance.SECOND, flax=ours.second, torch=theirs.second)


def lower(dtype: str, pair: Pair) -> Check:
    """Outputs and gradients in a lower dtype, against PyTorch's own error in it."""
    spec = pair.lower[dtype]
    nudges = [spec, *(replace(spec, name=f"{dtype}, nudged {i}", rounding_seed=i) for i in range(1, tolerance.DRAWS))]
    try:
        theirs, *others = [pair.run("torch", nudged) for nudged in nudges]
    except AdapterError as error:
        raise NotRun(f"the rule is PyTorch's own error, and {error}") from None
    ours = pair.run("flax", spec)
    reference, eps = pair.reference, float(ml_dtypes.finfo(dtype).eps)
    nonzero_gradient = {
        name: gradient for name, gradient in _shared(pair, reference.gradients).items() if name not in pair.null
    }
    outputs = {name: output for name, output in reference.outputs.items() if is_floating(output)}
    own = [[getattr(draw, kind) for draw in (theirs, *others)] for kind in ("outputs", "gradients")]
    errors = tolerance.lower_dtype(ours.outputs, own[0], outputs, tolerance.LOW_FORWARD, eps)
    errors |= tolerance.lower_dtype(ours.gradients, own[1], nonzero_gradient, tolerance.LOW_GRADIENT, eps)
    kinds = sorted(set(ours.dtypes.values()) ^ set(theirs.dtypes.values()))
    note = f"outputs are {ours.dtypes} in flax and {theirs.dtypes} in torch" if kinds else ""
    flax, torch = ({**result.outputs, **result.gradients} for result in (ours, theirs))
    return worst_of(dtype, errors, 1.0, note, flax=flax, torch=torch)


def eager(pair: Pair) -> Check:
    """Compiled and eager execution of the Flax side."""
    outputs = pair.run("flax", pair.uncompiled).outputs
    errors = tolerance.relative(outputs, pair.flax64.outputs)
    return worst_of("jit = eager", errors, tolerance.FORWARD)


def dropout(pair: Pair) -> Check:
    """Outputs and gradients in train mode, both sides given the same dropout key."""
    if not pair.takes("dropout_key"):
        raise NotRun("the calls take no dropout_key, so the two sides cannot be made to drop the same")
    ours, theirs = pair.both(pair.training())
    if all(np.array_equal(theirs.outputs[name], pair.plain.outputs[name], equal_nan=True) for name in theirs.outputs):
        raise NotRun("nothing is dropped: train mode computes what eval mode does")
    errors = tolerance.relative(ours.outputs, theirs.outputs)
    errors |= tolerance.gradient_errors(ours.gradients, _shared(pair, theirs.gradients))
    flax, torch = ({**result.outputs, **result.gradients} for result in (ours, theirs))
    return worst_of("dropout", errors, tolerance.GRADIENT, flax=flax, torch=torch)


def unbatched(pair: Pair) -> Check:
    """Inputs without the batch axis, on both sides, against the first row of the batch."""
    sizes = {len(x) for x in pair.inputs.values() if x.ndim}
    if len(sizes) != 1 or pair.extras:
        raise NotRun("the inputs have no batch axis in common")
    try:
        ours, theirs = pair.both(pair.run_spec("unbatched", inputs={name: x[0] for name, x in pair.inputs.items()}))
    except AdapterError as refusal:
        raise NotRun(f"one side takes batches alone: {refusal}") from None
    rows = {name: output[0] for name, output in pair.plain.outputs.items() if output.ndim}
    if max(tolerance.relative(theirs.outputs, rows).values(), default=np.inf) > tolerance.FORWARD:
        raise NotRun("PyTorch reads the first axis of any input as a batch")
    return worst_of("unbatched", tolerance.relative(ours.outputs, theirs.outputs), tolerance.FORWARD)


def cache(pair: Pair) -> Check:
    """Outputs computed in steps with a cache, against all at once."""
    having = [side for side in ("flax", "torch") if getattr(pair, side).has_cache]
    if not having:
        raise NotRun("no call computes in steps: give flax_cached or torch_cached")
    reference, errors = pair.plain.outputs, {}
    for side in having:
        outputs = pair.run(side, pair.run_spec("cached", cached=True)).outputs
        errors |= {f"{side}: {name}": error for name, error in tolerance.relative(outputs, reference).items()}
    return worst_of("cache = full", errors, tolerance.FORWARD)


def training(pair: Pair) -> Check:
    """Losses and parameters over the steps of the recipe in float64."""
    if not pair.has_parameters:
        raise NotRun("there are no parameters")
    if not pair.shares_weights:
        raise NotRun("no layout says which parameter is which")
    # What the function does not feel moves by rounding alone, which Adam makes as large as any other step.
    nonzero_gradient = tolerance.nonzero_gradient(pair.flax64.gradients, _shared(pair, pair.reference.gradients))
    ours, reference = (
        {name: np.where(nonzero_gradient.get(name, True), value, 0.0) for name, value in side.items()}
        for side in pair.trained
    )
    errors = tolerance.relative(ours, {name: value for name, value in reference.items() if name not in pair.null})
    return worst_of("training", errors, tolerance.TRAINING, flax=ours, torch=reference)


def stress(name: str, pair: Pair) -> Check:
    """Outputs and gradients in float64 on inputs that are hard on purpose.

    Held to the rule, or to what rounding does to the PyTorch side, whichever is more.
    """
    hard = STRESS_INPUTS[name](pair)
    plain = pair.run_spec(f"{name}: outputs", inputs=hard.inputs, extras=hard.extras, eager=True)
    try:
        outputs = pair.run("torch", plain).outputs
    except AdapterError as refusal:
        raise NotRun(f"these inputs are none for it: {refusal}") from None
    asked = replace(plain, name=name, cotangents=pair.cotangents_for(outputs), eager=False)
    ours, theirs = (_with_gradients(pair, result) for result in pair.both(asked))
    # Rounding shows in float32: of outputs on the PyTorch side, so that a port that amplifies it is seen; of gradients
    # on both, because where a softmax saturates either may hit a zero exactly and show none.
    # One draw of it may be a lucky one.
    low = replace(asked, name=f"{name}: float32", dtype="float32")
    nudges = [replace(low, name=f"{low.name}, nudged {i}", rounding_seed=i) for i in range(1, tolerance.DRAWS)]
    results = [*pair.both(low), *(pair.run("torch", nudged) for nudged in nudges)]
    singles = [_with_gradients(pair, result) for result in results]
    rounding = tolerance.relative(singles[1].outputs, theirs.outputs)
    errors = tolerance.conditioned(tolerance.relative(ours.outputs, theirs.outputs), rounding, tolerance.FORWARD)
    rounding = _largest(tolerance.gradient_errors(single.gradients, theirs.gradients) for single in singles)
    most = tolerance.excesses(theirs.gradients)
    found = tolerance.gradient_errors(ours.gradients, theirs.gradients)
    errors |= tolerance.conditioned(found, rounding, tolerance.GRADIENT, most)
    flax, torch = ({**result.outputs, **result.gradients} for result in (ours, theirs))
    return worst_of(name, errors, 1.0, _poisoned(theirs, hard.extras), flax=flax, torch=torch)


def _largest(errors: Iterable[dict[str, float]]) -> dict[str, float]:
    first, *others = errors
    return {name: max(error, *(other[name] for other in others)) for name, error in first.items()}


def _with_gradients(pair: Pair, result: Result) -> Result:
    named = {f"gradient of {name}": gradient for name, gradient in _shared(pair, result.gradients).items()}
    return replace(result, gradients=named)


def _poisoned(reference: Result, extras) -> str:
    # Both sides may agree in letting through what they should not.
    if "lengths" not in extras:
        return ""
    bad = [
        name
        for name, output in reference.outputs.items()
        if output.ndim > 1 and output.shape[0] == len(extras["lengths"])
        for row, length in enumerate(extras["lengths"])
        if length and not np.isfinite(output[row, :length] if output.shape[1] >= length else output[row]).all()
    ]
    return f"PyTorch lets padding reach real tokens of {', '.join(sorted(set(bad)))}" if bad else ""


def _shared(pair: Pair, gradients) -> dict[str, np.ndarray]:
    shared = {entry.theirs for entry in pair.entries} | set(pair.inputs)
    return {name: gradient for name, gradient in gradients.items() if name in shared}


def _described(result: Result, name: str) -> str:
    return f"{result.dtypes[name]}{list(result.outputs[name].shape)}" if name in result.outputs else "nothing"


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
    """Return the checks of these names, or all, one by one; one that does not apply comes with the reason.

    Args:
        pair: what is checked.
        names: from `CHECKS`; None is all.
        wanted: whether one of these names that does not apply is a failure.
        watch: is told each name before its check is made.

    Raises:
        ValueError: if a name is unknown.
        PairingError: if a side cannot be run at all.
    """
    for name in names or ():
        check_choice("check", name, tuple(CHECKS))
    return _run_checks(pair, names, wanted, watch)


def _run_checks(pair: Pair, names: Sequence[str] | None, wanted: bool, watch: Callable[[str], None]) -> Iterator[Check]:
    for name in CHECKS if names is None else names:
        watch(name)
        try:
            yield CHECKS[name](pair)
        except NotRun as reason:
            yield Check(name, np.inf, 0.0, skipped=str(reason), wanted=wanted and names is not None)
        except AdapterError as error:
            if isinstance(error.__cause__, PairingError):
                raise error.__cause__ from None
            yield Check(name, np.inf, 0.0, worst="the call itself", note=str(error))
