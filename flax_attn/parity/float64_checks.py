"""The checks in float64: what two equal functions agree in to rounding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import (
    AdapterError,
    Arrays,
    BothRaise,
    NothingCompared,
    NotRun,
    Result,
    Untested,
    is_floating,
)
from flax_attn.parity.check import NOTHING, Check, any_finite, worst_of, worst_output
from flax_attn.parity.index_probe import index_probe
from flax_attn.parity.pair import LOWER, Pair


def shapes(pair: Pair) -> Check:
    """Names, shapes and dtypes of the outputs."""
    ours = pair.run("flax", pair.uncompiled)
    unlike = "; ".join(_unlike(ours.outputs, pair.plain.outputs))
    return worst_of("shapes", dict(_compared(ours, pair.plain)), 0.0, unlike)


def _unlike(ours: Arrays, theirs: Arrays) -> Iterator[str]:
    """Yield a sentence for each output of another shape."""
    for name in theirs:
        if name in ours and ours[name].shape != theirs[name].shape:
            yield f"{name} has the shape {ours[name].shape} in JAX, {theirs[name].shape} in PyTorch"


def _compared(ours: Result, theirs: Result) -> Iterator[tuple[str, float]]:
    # Those of PyTorch come first; a dictionary keeps one of each name.
    names = {**theirs.outputs, **ours.outputs}
    for name in names:
        left = _described(ours, name)
        right = _described(theirs, name)
        yield f"{name}: flax {left}, torch {right}", float(left != right)


def weights(pair: Pair) -> Check:
    """Check coverage and round trip: every numbered element is converted and found exactly once."""
    _check_shared(pair)
    return worst_of("weights", dict(index_probe(pair)), 0.0)


def _check_shared(pair: Pair) -> None:
    if not pair.has_parameters:
        raise NotRun("there are no parameters")
    if not pair.shares_weights:
        raise Untested("without a layout it is not known which parameter is which")


def forward(pair: Pair) -> Check:
    """Outputs in float64."""
    try:
        ours, theirs = pair.both(pair.float64)
    except BothRaise as error:
        # Every pair has outputs, so this check applies to each.
        raise NothingCompared(f"{error}. Pass inputs that both can be differentiated on") from None
    check = worst_output("forward", ours.outputs, theirs.outputs, _low(ours))
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
        " dtype=, or, if its dtype is fixed at construction, run `flax-attn compare"
        " FILE.py:FLAX FILE.py:TORCH`, which enables x64 before either is constructed"
    )


def gradients(pair: Pair) -> Check:
    """Compare float64 gradients of shared parameters and floating inputs for random cotangents."""
    check_numbers(pair, pair.cotangents)
    ours, theirs = pair.both(pair.float64)
    reference = pair.shared(theirs.gradients)
    if not reference:
        raise NotRun("no parameter is shared and no input is floating")
    null = _without_effect(ours.gradients, reference)
    notes = []
    if null:
        notes.append(f"no effect on the outputs: {', '.join(null)}")
    if pair.has_parameters and not pair.shares_weights:
        notes.append("parameters are not shared: inputs only")
    errors = tolerance.gradient_errors(ours.gradients, reference)
    arrays = {"flax": ours.gradients, "torch": reference}
    return worst_of("gradients", errors, tolerance.GRADIENT, "; ".join(notes), **arrays)


def check_numbers(pair: Pair, names: Iterable[str]) -> None:
    """Raise where what is differentiated holds no number: all gradients of nothing are 0."""
    if not any_finite({name: pair.plain.outputs[name] for name in names}):
        raise NothingCompared(NOTHING)


def _without_effect(ours: Arrays, reference: Arrays) -> list[str]:
    null = tolerance.null_directions(reference)
    nonzero = tolerance.nonzero_gradient(ours, reference)
    parts = {name: mask for name, mask in nonzero.items() if name not in null}
    return [*sorted(null), *_rounding(parts)]


def _rounding(nonzero: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Yield the gradients, and the parts of gradients, that are rounding alone."""
    for name, mask in nonzero.items():
        if not mask.any():
            yield name
        elif not mask.all():
            yield f"{(~mask).sum()} of {mask.size} elements of {name}"


def eager(pair: Pair) -> Check:
    """Outputs compiled as users do, and with their gradients, against eager execution in JAX."""
    reference = pair.run("flax", pair.uncompiled).outputs
    # A compiler fuses the outputs in other ways where gradients need parts of them.
    alone = pair.run("flax", pair.as_users_compile).outputs
    errors = tolerance.relative(alone, reference)
    with_gradients = tolerance.relative(pair.flax64.outputs, reference)
    errors |= {f"{name} beside gradients": error for name, error in with_gradients.items()}
    return worst_of("jit = eager", errors, tolerance.FORWARD, reference=reference)


def unbatched(pair: Pair) -> Check:
    """Inputs without the batch axis, against the first row of the batch."""
    sizes = {len(x) for x in pair.inputs.values() if x.ndim}
    if len(sizes) != 1 or pair.extras:
        raise NotRun("the inputs have no batch axis in common")
    if sizes == {0}:
        raise NothingCompared(NOTHING)
    first = {name: x[0] for name, x in pair.inputs.items()}
    spec = pair.run_spec("unbatched", inputs=first)
    try:
        ours, theirs = pair.both(spec)
    except AdapterError as error:
        raise NotRun(f"one of the calls takes batches only: {error}") from None
    rows = {}
    for name, output in pair.plain.outputs.items():
        if output.ndim and len(output):
            rows[name] = np.asarray(output[0])
    # A module without a batch axis returns something else for one row.
    apart = tolerance.relative(theirs.outputs, rows)
    if not apart or not tolerance.within(apart, tolerance.FORWARD):
        raise NotRun("PyTorch takes the first axis of any input as a batch")
    errors = tolerance.relative(ours.outputs, theirs.outputs)
    return worst_of("unbatched", errors, tolerance.FORWARD, reference=theirs.outputs)


def cache(pair: Pair) -> Check:
    """Outputs computed in steps with a cache, against all at once."""
    if not pair.flax.has_cache and not pair.torch.has_cache:
        raise NotRun("no call computes in steps: pass flax_cached or torch_cached")
    # Both are compared with PyTorch without a cache, so that no error cancels.
    reference = pair.plain.outputs
    spec = pair.run_spec("cached", cached=True)
    errors = {}
    for framework, adapter in {"flax": pair.flax, "torch": pair.torch}.items():
        if not adapter.has_cache:
            continue
        outputs = pair.run(framework, spec).outputs
        own = tolerance.relative(outputs, reference)
        errors |= {f"{framework}: {name}": error for name, error in own.items()}
    return worst_of("cache = full", errors, tolerance.FORWARD, reference=reference)


def training(pair: Pair) -> Check:
    """Losses and parameters over the steps of the recipe in float64."""
    _check_shared(pair)
    if not pair.trainable:
        raise NotRun("no parameter is trained")
    check_numbers(pair, pair.cotangents)
    # In the mode that is trained in: batch statistics take all effect from a bias before them.
    spec = pair.training() if pair.takes("dropout_key") else pair.float64
    ours, theirs = pair.both(spec)
    nonzero = tolerance.nonzero_gradient(ours.gradients, pair.shared(theirs.gradients))
    notes = []
    rounding = ", ".join(_rounding(nonzero))
    if rounding:
        notes.append(f"not compared, as AdamW divides rounding by rounding: {rounding}")
    ours, reference = [_moved(arrays, nonzero) for arrays in pair.trained]
    errors = tolerance.relative(ours, reference)
    rule = tolerance.TRAINING
    if not tolerance.within(errors, rule) and tolerance.within(errors, tolerance.MOST_TRAINING):
        moved = [tolerance.relative(_moved(draw, nonzero), reference) for draw in _rounded(pair)]
        errors = tolerance.amplified(errors, moved, rule, tolerance.MOST_TRAINING)
        rule = 1.0
        notes.append("relative to what one rounding more of a step moves in PyTorch")
    return worst_of("training", errors, rule, "; ".join(notes), flax=ours, torch=reference)


def _rounded(pair: Pair) -> Iterator[Arrays]:
    """Yield what PyTorch trains with one rounding more of each step, for several draws."""
    spec = pair.training_spec()
    # An export holds none of them.
    if pair.own_torch is None:
        yield pair.trained[1]
        return
    for seed in range(1, tolerance.DRAWS):
        yield pair.own_torch.train(replace(spec, rounding_seed=seed))


def _moved(arrays: Arrays, nonzero: Mapping[str, np.ndarray]) -> Arrays:
    """Return losses and parameters, 0 where a gradient is rounding alone."""
    found = {}
    for name, array in arrays.items():
        # Losses have no gradient, and all of them count.
        moving = nonzero.get(name, np.True_)
        if np.any(moving):
            found[name] = np.where(moving, array, 0.0)
    return found


def _described(result: Result, name: str) -> str:
    if name not in result.outputs:
        return "nothing"
    return f"{result.dtypes[name]}{list(result.outputs[name].shape)}"
