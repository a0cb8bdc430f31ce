"""Inputs on which ports differ that agree on ordinary ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import (
    AdapterError,
    Arrays,
    NotRun,
    Result,
    RunSpec,
    Untested,
    is_floating,
)
from flax_attn.parity.check import Check, Situation, any_finite, worst_of
from flax_attn.parity.listed import listed
from flax_attn.parity.loaded import loaded
from flax_attn.parity.one_pass import in_two_passes
from flax_attn.parity.padding import GRADIENT_OF, padding_in_torch
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace.norms import offset_errors
from flax_attn.parity.variations import are_finite

Change = Callable[[np.ndarray], np.ndarray]
PADDING = "non-finite padding"
MEAN_OFFSET = "mean offset"
ONE_PASS = (
    "it fails by the variance that norms of Flax take in one pass, and holds with"
    " use_fast_variance=False"
)
# Tokens: enough for positions to matter, and no multiple of anything.
LONG = 193
# Factors of the weight matrices, the first at which rounding changes less than this.
SCALES = (1_000_000, 1000, 100, 10)
ROUNDING = 1e-10
# Tensors that a sentence names.
NAMED = 3


def huge_logits(pair: Pair) -> Situation:
    """Scores of about 1e4: softmax selects one key, and overflows without a maximum subtracted."""
    return _each(pair, lambda x: 100 * x)


def small_activations(pair: Pair) -> Situation:
    """Activations of 1e-3, where the epsilon of a norm matters."""
    return _each(pair, lambda x: 1e-3 * x)


def mean_offset(pair: Pair) -> Situation:
    """A mean of 1e3, where a variance computed in one pass loses its digits."""
    return _each(pair, lambda x: x + 1e3)


def duplicate_tokens(pair: Pair) -> Situation:
    """The first token everywhere: all scores of a row are equal."""
    return _tokens(pair, lambda x: np.repeat(x[:, :1], x.shape[1], axis=1))


def single_token(pair: Pair) -> Situation:
    """One token."""
    return _tokens(pair, lambda x: x[:, :1])


def long_sequence(pair: Pair) -> Situation:
    """Many tokens, all different, so that positions matter."""
    random = np.random.default_rng(pair.seed)

    def lengthen(x: np.ndarray) -> np.ndarray:
        shape = (x.shape[0], LONG, *x.shape[2:])
        if is_floating(x):
            return random.normal(size=shape)
        # In whole numbers, since a boolean plus 1 is one; a mask stays a mask.
        smallest, largest = int(x.min()), int(x.max())
        drawn = random.integers(smallest, largest + 1, shape)
        return drawn.astype(x.dtype)

    return _tokens(pair, lengthen)


def padded_rows(pair: Pair) -> Situation:
    """Rows of different lengths, the first of them all padding."""
    return Situation(pair.inputs, {**pair.extras, "lengths": _lengths(pair)})


def nonfinite_padding(pair: Pair) -> Situation:
    """NaN and infinity in the padding, which must not reach real tokens."""
    lengths = _lengths(pair)

    def fill(x: np.ndarray) -> np.ndarray:
        # The inputs of the pair stay as they are.
        filled = x.copy()
        for row, length in enumerate(lengths):
            filled[row, length:] = np.nan if row % 2 else np.inf
        return filled

    filled = _each(pair, fill, "no input is floating, so none can hold NaN")
    return Situation(filled.inputs, {**pair.extras, "lengths": lengths})


def huge_scores(pair: Pair) -> Situation:
    """Weight matrices up to 1e6 times as large: behind a norm, no input makes large scores."""
    matrices = [name for name in sorted(pair.trainable) if pair.weights[name].ndim > 1]
    if not matrices:
        raise NotRun("no shared parameter is a matrix")
    random = np.random.default_rng(pair.seed)
    signed = dict(pair.weights)
    for name in matrices:
        # Rows of either sign, so that all scores that someone sees may be far below 0.
        matrix = pair.weights[name]
        signs = random.choice([-1, 1], matrix.shape[0])
        signed[name] = (signs * matrix.T).T
    for scale in SCALES:
        larger = {name: scale * signed[name] for name in matrices}
        weights = signed | larger
        if _is_stable(pair, f"huge scores, weights times {scale}", weights):
            return Situation(pair.inputs, dict(pair.extras), weights)
    raise Untested(
        "with larger weights rounding alone changes what PyTorch returns, or it overflows"
    )


def _is_stable(pair: Pair, name: str, weights: Arrays) -> bool:
    """Whether PyTorch's results are finite, and its outputs stay where all is rounded once more."""
    spec = replace(pair.float64, name=name)
    rounded = replace(spec, name=f"{name}, rounded", cotangents=None, rounding_seed=1)
    with loaded(pair, weights):
        found = pair.run("torch", spec)
        moved = pair.run("torch", rounded)
    errors = tolerance.relative(moved.outputs, found.outputs)
    return are_finite(found.arrays) and tolerance.within(errors, ROUNDING)


STRESS_INPUTS: dict[str, Callable[[Pair], Situation]] = {
    "huge logits": huge_logits,
    "huge scores": huge_scores,
    "small activations": small_activations,
    MEAN_OFFSET: mean_offset,
    "duplicate tokens": duplicate_tokens,
    "single token": single_token,
    "long sequence": long_sequence,
    "padded rows": padded_rows,
    PADDING: nonfinite_padding,
}


def stress(name: str, pair: Pair) -> Check:
    """Compare float64 outputs and gradients on a stress input; at a mean offset, also each norm.

    The limit is the rule, or what rounding does to the PyTorch module, whichever is larger.

    Raises:
        Untested: if it is only the variance of Flax's own norms that breaks the rule.
    """
    check = _stress(name, pair)
    if name == MEAN_OFFSET and check.failed:
        repaired = in_two_passes(pair)
        if repaired is not None and _stress(name, repaired).passed:
            raise Untested(ONE_PASS)
    return check


def _stress(name: str, pair: Pair) -> Check:
    within = offset_errors(pair) if name == MEAN_OFFSET else {}
    try:
        hard = STRESS_INPUTS[name](pair)
    except NotRun:
        if within:
            return worst_of(name, within, 1.0, "norms by themselves alone: no input is floating")
        raise
    with loaded(pair, hard.weights) if hard.weights else nullcontext():
        return _judged(name, pair, hard, within)


def _judged(name: str, pair: Pair, hard: Situation, within: dict[str, float]) -> Check:
    plain = pair.run_spec(f"{name}: outputs", inputs=hard.inputs, extras=hard.extras, eager=True)
    try:
        outputs = pair.run("torch", plain).outputs
    except AdapterError as error:
        raise NotRun(f"PyTorch does not take these inputs: {error}") from None
    if not any_finite(outputs):
        raise NotRun("PyTorch returns no finite number on these inputs")
    cotangents = pair.cotangents_for(outputs)
    spec = replace(plain, name=name, cotangents=cotangents, eager=False)
    both = pair.both(spec)
    # What rounding does to PyTorch is allowed, so that a port that amplifies it fails. A gradient
    # may have no digit that is not rounding, as where tanh saturates and 1 - tanh**2 is left.
    _, *moved = draws(pair, "torch", spec)
    ours, theirs, *moved = [_with_gradients(pair, result) for result in (*both, *moved)]
    untested = []
    if name == PADDING:
        untested += padding_in_torch(theirs, hard.extras["lengths"], pair.trainable)
    elif not are_finite(theirs.gradients):
        # What is 0 times infinity depends on the order of a backward pass.
        untested.append("gradients: those of PyTorch are not finite here")
        ours = replace(ours, gradients={})
        theirs = replace(theirs, gradients={})
    errors, drowned = _excesses(ours, theirs, moved)
    if not tolerance.within(errors, 1.0):
        _refuse_ties(pair, spec, theirs)
    errors |= within
    # They were judged, by what rounding does, and have no digit that could be judged further.
    note = "; ".join([*untested, *drowned])
    check = worst_of(name, errors, 1.0, note, flax=ours.arrays, torch=theirs.arrays)
    sentences = tuple(f"{name}: {sentence}" for sentence in untested)
    return replace(check, untested=sentences, seen=hard)


def _excesses(
    ours: Result, theirs: Result, moved: Sequence[Result]
) -> tuple[dict[str, float], list[str]]:
    """Return the errors over what is allowed, and the gradients that rounding leaves unproven."""
    outputs = tolerance.relative(ours.outputs, theirs.outputs)
    rounding = [tolerance.relative(draw.outputs, theirs.outputs) for draw in moved]
    most = tolerance.MOST_FORWARD
    errors = tolerance.amplified(outputs, rounding, tolerance.FORWARD, most)
    gradients = tolerance.gradient_errors(ours.gradients, theirs.gradients)
    rounding = [tolerance.gradient_errors(draw.gradients, theirs.gradients) for draw in moved]
    # Without a cap: a gradient of which nothing is left but rounding is named below.
    excesses = tolerance.amplified(gradients, rounding, tolerance.GRADIENT)
    drowned = []
    for name, excess in excesses.items():
        if excess <= 1 and gradients[name] > tolerance.MOST_GRADIENT:
            drowned.append(name)
        else:
            errors[name] = excess
    return errors, _of_rounding(drowned)


def _of_rounding(names: Sequence[str]) -> list[str]:
    """Return a sentence about gradients of which nothing is left but rounding, if there are any."""
    if not names:
        return []
    return [
        f"{listed(names, NAMED)}: rounding alone moves that of PyTorch as much as JAX's differs"
    ]


def _refuse_ties(pair: Pair, spec: RunSpec, theirs: Result) -> None:
    """Raise if the results of PyTorch depend on which of equal values it selects."""
    if pair.own_torch is None:
        return
    from flax_attn.parity.adapters.torch_ties import OtherTies

    # Not by `pair.run`, which keeps the first result of a spec.
    with OtherTies():
        others = pair.own_torch.run(spec)
    errors, _ = _excesses(_with_gradients(pair, others), theirs, [theirs])
    if not tolerance.within(errors, 1.0):
        raise Untested(
            "on these inputs PyTorch selects among equal values, and which of them it takes changes"
            " its results"
        )


def draws(pair: Pair, framework: str, spec: RunSpec, count: int = tolerance.DRAWS) -> list[Result]:
    """Return results in a dtype: one rounded to nearest, the others stochastically."""
    specs = [spec]
    for seed in range(1, count):
        specs.append(replace(spec, name=f"{spec.name}, rounding {seed}", rounding_seed=seed))
    return [pair.run(framework, draw) for draw in specs]


def _with_gradients(pair: Pair, result: Result) -> Result:
    shared = pair.shared(result.gradients)
    named = {f"{GRADIENT_OF}{name}": gradient for name, gradient in shared.items()}
    return replace(result, gradients=named)


def _each(pair: Pair, change: Change, otherwise: str = "no input is floating") -> Situation:
    if not any(is_floating(x) for x in pair.inputs.values()):
        raise NotRun(otherwise)
    inputs = {name: change(x) if is_floating(x) else x for name, x in pair.inputs.items()}
    return Situation(inputs, dict(pair.extras))


def _tokens(pair: Pair, change: Change) -> Situation:
    # Floats have an axis of width beside those of rows and tokens.
    if any(x.ndim - is_floating(x) < 2 for x in pair.inputs.values()):
        raise NotRun(
            "tokens are the second axis of floats of rank 3, or of integers of rank 2; an input has"
            " neither"
        )
    return Situation({name: change(x) for name, x in pair.inputs.items()}, dict(pair.extras))


def _lengths(pair: Pair) -> np.ndarray:
    if not pair.takes("lengths"):
        raise NotRun("the calls take no lengths: give both a call with a keyword `lengths`, (b,)")
    shapes = {x.shape[:2] for x in pair.inputs.values() if x.ndim > 1}
    if len(shapes) != 1:
        raise NotRun(f"lengths are those of one sequence; the inputs have {sorted(shapes)}")
    batch, tokens = shapes.pop()
    if batch <= 2:
        # A row of which a part is padding, after one that is nothing else.
        lengths = np.array([0, tokens - 1])
        return lengths[-batch:]
    # From all padding in the first row to none in the last.
    rows = np.arange(batch)
    return rows * tokens // (batch - 1)
