"""The checks of a pair, the fastest first. Each returns what it measured beside its rule.

A check that does not apply to a pair raises `NotRun` with the reason, which becomes a line in the
report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import (
    AdapterError,
    Arrays,
    BothRaise,
    NothingCompared,
    NotRun,
    PairingError,
    ReplacedError,
    Result,
    Untested,
    is_floating,
)
from flax_attn.parity.adapters.recording import ExportError
from flax_attn.parity.check import NOTHING, Check, any_finite, worst_of
from flax_attn.parity.dropout import dropout
from flax_attn.parity.ids import ids
from flax_attn.parity.index_probe import index_probe
from flax_attn.parity.lower_dtype import lower_dtype
from flax_attn.parity.masks import masks
from flax_attn.parity.other_shapes import other_shapes
from flax_attn.parity.pair import LOWER, Pair
from flax_attn.parity.precision import precision
from flax_attn.parity.repeated_calls import twice
from flax_attn.parity.running_statistics import running_statistics
from flax_attn.parity.stress import STRESS_INPUTS, stress
from flax_attn.parity.training import check_choice


def shapes(pair: Pair) -> Check:
    """Names, shapes and dtypes of the outputs."""
    ours = pair.run("flax", pair.uncompiled)
    theirs = pair.plain
    errors = {}
    # Those of PyTorch come first; a dictionary keeps one of each name.
    for name in {**theirs.outputs, **ours.outputs}:
        left = _described(ours, name)
        right = _described(theirs, name)
        errors[f"{name}: flax {left}, torch {right}"] = float(left != right)
    return worst_of("shapes", errors, 0.0)


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
        " dtype=, or, if its dtype is fixed at construction, run `flax-attn compare"
        " FILE.py:FLAX FILE.py:TORCH`, which enables x64 before either is constructed"
    )


def gradients(pair: Pair) -> Check:
    """Compare float64 gradients of shared parameters and floating inputs for random cotangents."""
    _check_numbers(pair, pair.cotangents)
    ours, theirs = pair.both(pair.float64)
    reference = pair.shared(theirs.gradients)
    if not reference:
        raise NotRun("no parameter is shared and no input is floating")
    notes = []
    null = _without_effect(ours.gradients, reference)
    if null:
        notes.append(f"no effect on the outputs: {', '.join(null)}")
    if pair.has_parameters and not pair.shares_weights:
        notes.append("parameters are not shared: inputs only")
    errors = tolerance.gradient_errors(ours.gradients, reference)
    arrays = {"flax": ours.gradients, "torch": reference}
    return worst_of("gradients", errors, tolerance.GRADIENT, "; ".join(notes), **arrays)


def _check_numbers(pair: Pair, names: Iterable[str]) -> None:
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


def second(pair: Pair) -> Check:
    """Derivative of the gradients along a random direction, in float64."""
    _check_numbers(pair, pair.cotangents)
    if not pair.tangents:
        raise NotRun("no parameter is shared and no input is floating")
    spec = pair.run_spec("second", cotangents=pair.cotangents, tangents=pair.tangents)
    try:
        theirs = pair.run("torch", spec)
    except AdapterError as error:
        raise NotRun(f"PyTorch, the reference, gives no second derivative: {error}") from None
    ours = pair.run("flax", spec)
    reference = pair.shared(theirs.second)
    errors = tolerance.gradient_errors(ours.second, reference)
    return worst_of("second", errors, tolerance.SECOND, flax=ours.second, torch=reference)


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
    try:
        ours, theirs = pair.both(pair.run_spec("unbatched", inputs=first))
    except AdapterError as error:
        raise NotRun(f"one of the calls takes batches only: {error}") from None
    rows = {}
    for name, output in pair.plain.outputs.items():
        if output.ndim and len(output):
            rows[name] = np.asarray(output[0])
    # A module without a batch axis returns something else for one row.
    apart = tolerance.relative(theirs.outputs, rows)
    if max(apart.values(), default=np.inf) > tolerance.FORWARD:
        raise NotRun("PyTorch takes the first axis of any input as a batch")
    errors = tolerance.relative(ours.outputs, theirs.outputs)
    return worst_of("unbatched", errors, tolerance.FORWARD, reference=theirs.outputs)


def cache(pair: Pair) -> Check:
    """Outputs computed in steps with a cache, against all at once."""
    cached = [framework for framework in ("flax", "torch") if getattr(pair, framework).has_cache]
    if not cached:
        raise NotRun("no call computes in steps: pass flax_cached or torch_cached")
    reference = pair.plain.outputs
    # Both are compared with PyTorch without a cache, so that no error cancels.
    spec = pair.run_spec("cached", cached=True)
    errors = {}
    for framework in cached:
        own = tolerance.relative(pair.run(framework, spec).outputs, reference)
        errors |= {f"{framework}: {name}": error for name, error in own.items()}
    return worst_of("cache = full", errors, tolerance.FORWARD, reference=reference)


def training(pair: Pair) -> Check:
    """Losses and parameters over the steps of the recipe in float64."""
    _check_shared(pair)
    if not pair.trainable:
        raise NotRun("no parameter is trained")
    _check_numbers(pair, pair.cotangents)
    # In the mode that is trained in: batch statistics take all effect from a bias before them.
    ours, theirs = pair.both(pair.training() if pair.takes("dropout_key") else pair.float64)
    nonzero = tolerance.nonzero_gradient(ours.gradients, pair.shared(theirs.gradients))
    rounding = ", ".join(_rounding(nonzero))
    note = f"not compared, as AdamW divides rounding by rounding: {rounding}" if rounding else ""

    def compared(arrays: Arrays) -> Arrays:
        moving = {name: nonzero.get(name, np.True_) for name in arrays}
        return {name: np.where(moving[name], a, 0.0) for name, a in arrays.items()}

    ours, theirs = pair.trained
    ours = compared(ours)
    reference = {name: a for name, a in compared(theirs).items() if np.any(nonzero.get(name, 1))}
    errors = tolerance.relative(ours, reference)
    return worst_of("training", errors, tolerance.TRAINING, note, flax=ours, torch=reference)


def _described(result: Result, name: str) -> str:
    if name not in result.outputs:
        return "nothing"
    return f"{result.dtypes[name]}{list(result.outputs[name].shape)}"


#: The checks of a comparison by name, in the order in which they run.
CHECKS: dict[str, Callable[[Pair], Check]] = {
    "shapes": shapes,
    "weights": weights,
    "forward": forward,
    "gradients": gradients,
    "second": second,
    **{dtype: partial(lower_dtype, dtype) for dtype in LOWER},
    "precision": precision,
    "jit = eager": eager,
    "twice": twice,
    "dropout": dropout,
    "running statistics": running_statistics,
    "unbatched": unbatched,
    "other shapes": other_shapes,
    "masks": masks,
    "ids": ids,
    "cache = full": cache,
    **{name: partial(stress, name) for name in STRESS_INPUTS},
    "training": training,
}


def run_checks(
    pair: Pair,
    names: Sequence[str] | None = None,
    wanted: bool = True,
    watch: Callable[[str], None] = lambda name: None,
    left_out: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Check]:
    """Yield the checks one by one; one that does not apply, or raises, comes with the reason.

    Args:
        pair: pair of modules to check.
        names: names from `CHECKS`; None is all.
        wanted: whether a check in `names` that does not apply is a failure.
        watch: function called with the name of each check before it runs.
        left_out: reason for each check that must not run.

    Raises:
        ValueError: if a name is unknown.
        ExportError: if the PyTorch side is an export of another comparison.
        ReplacedError: if a function of PyTorch was replaced.
    """
    # All names are checked before the first check runs, which may take minutes.
    for name in names or ():
        check_choice("check", name, CHECKS)
    return _run_checks(pair, names, wanted, watch, left_out)


def _run_checks(
    pair: Pair,
    names: Sequence[str] | None,
    wanted: bool,
    watch: Callable[[str], None],
    left_out: Mapping[str, str],
) -> Iterator[Check]:
    for name in CHECKS if names is None else names:
        if name in left_out:
            yield Check(name, np.inf, 0.0, nothing=left_out[name])
            continue
        watch(name)
        try:
            yield CHECKS[name](pair)
        except NotRun as reason:
            yield _not_run(name, reason, wanted and names is not None)
        except NothingCompared as reason:
            yield Check(name, np.inf, 0.0, nothing=str(reason))
        # One that raises, in whatever library below it, must not cost what the others find.
        except Exception as error:
            # No check can use the export of other inputs, or a PyTorch that is none.
            if isinstance(error.__cause__, ExportError | ReplacedError):
                raise error.__cause__ from None
            yield _raised(name, error)


def _not_run(name: str, reason: NotRun, wanted: bool) -> Check:
    untested = (f"{name}: {reason}",) if isinstance(reason, Untested) else ()
    return Check(name, np.inf, 0.0, skipped=str(reason), wanted=wanted, untested=untested)


def _raised(name: str, error: Exception) -> Check:
    cause = error.__cause__
    if isinstance(error, AdapterError) and not isinstance(cause, PairingError):
        return Check(name, np.inf, 0.0, worst="the call itself", note=str(error))
    # Outputs that cannot be compared, or a fault of the check: that is no difference.
    raised = cause if isinstance(cause, PairingError) else error
    reason = f"the check raised {type(raised).__name__}: {raised}"
    return Check(name, np.inf, 0.0, nothing=reason)
