"""Inputs on which ports differ that agree on ordinary ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import (
    AdapterError,
    Arrays,
    NotRun,
    Result,
    RunSpec,
    is_floating,
)
from flax_attn.parity.check import Check, any_finite, worst_of
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace.norms import offset_errors

Change = Callable[[np.ndarray], np.ndarray]
# Tokens: enough for positions to matter, and no multiple of anything.
LONG = 193


@dataclass(frozen=True)
class StressInput:
    """Changed inputs, with the extras of the call."""

    inputs: Arrays
    extras: Arrays


def huge_logits(pair: Pair) -> StressInput:
    """Scores of about 1e4: softmax selects one key, and overflows without a maximum subtracted."""
    return _each(pair, lambda x: 100 * x)


def small_activations(pair: Pair) -> StressInput:
    """Activations of 1e-3, where the epsilon of a norm matters."""
    return _each(pair, lambda x: 1e-3 * x)


def mean_offset(pair: Pair) -> StressInput:
    """A mean of 1e3, where a variance computed in one pass loses its digits."""
    return _each(pair, lambda x: x + 1e3)


def duplicate_tokens(pair: Pair) -> StressInput:
    """The first token everywhere: all scores of a row are equal."""
    return _tokens(pair, lambda x: np.repeat(x[:, :1], x.shape[1], axis=1))


def single_token(pair: Pair) -> StressInput:
    """One token."""
    return _tokens(pair, lambda x: x[:, :1])


def long_sequence(pair: Pair) -> StressInput:
    """Many tokens, all different, so that positions matter."""
    random = np.random.default_rng(pair.seed)

    def lengthen(x):
        shape = (x.shape[0], LONG, *x.shape[2:])
        floats = is_floating(x)
        return random.normal(size=shape) if floats else random.integers(x.min(), x.max() + 1, shape)

    return _tokens(pair, lengthen)


def padded_rows(pair: Pair) -> StressInput:
    """Rows of different lengths, the first of them all padding."""
    return StressInput(pair.inputs, {**pair.extras, "lengths": _lengths(pair)})


def nonfinite_padding(pair: Pair) -> StressInput:
    """NaN and infinity in the padding, which must not reach real tokens."""
    lengths = _lengths(pair)

    def fill(x):
        # The inputs of the pair stay as they are.
        x = x.copy()
        for row, length in enumerate(lengths):
            x[row, length:] = np.nan if row % 2 else np.inf
        return x

    filled = _each(pair, fill, "no input is floating, so none can hold NaN")
    return StressInput(filled.inputs, {**pair.extras, "lengths": lengths})


STRESS_INPUTS: dict[str, Callable[[Pair], StressInput]] = {
    "huge logits": huge_logits,
    "small activations": small_activations,
    "mean offset": mean_offset,
    "duplicate tokens": duplicate_tokens,
    "single token": single_token,
    "long sequence": long_sequence,
    "padded rows": padded_rows,
    "non-finite padding": nonfinite_padding,
}


def stress(name: str, pair: Pair) -> Check:
    """Compare float64 outputs and gradients on a stress input; at a mean offset, also each norm.

    The limit is the rule, or what rounding does to the PyTorch module, whichever is larger.
    """
    within = offset_errors(pair) if name == "mean offset" else {}
    try:
        hard = STRESS_INPUTS[name](pair)
    except NotRun:
        if within:
            return worst_of(name, within, 1.0, "norms by themselves alone: no input is floating")
        raise
    plain = pair.run_spec(f"{name}: outputs", inputs=hard.inputs, extras=hard.extras, eager=True)
    try:
        outputs = pair.run("torch", plain).outputs
    except AdapterError as error:
        raise NotRun(f"PyTorch does not take these inputs: {error}") from None
    if not any_finite(outputs):
        raise NotRun("PyTorch returns no finite number on these inputs")
    spec = replace(plain, name=name, cotangents=pair.cotangents_for(outputs), eager=False)
    ours, theirs = pair.both(spec)
    # The effect of rounding shows in float32: of outputs in PyTorch, so that a port that amplifies
    # it fails; of gradients in both, since where a softmax saturates either may be exactly 0 and
    # show none. One draw of it may be a lucky one.
    low = replace(spec, name=f"{name}: float32", dtype="float32")
    singles = pair.run("flax", low), *draws(pair, "torch", low)
    ours, theirs, *singles = [_with_gradients(pair, result) for result in (ours, theirs, *singles)]
    errors = _output_errors(ours, theirs, singles[1])
    errors |= _gradient_errors(ours, theirs, singles)
    errors |= within
    note = _nonfinite_outputs(theirs, hard.extras)
    return worst_of(name, errors, 1.0, note, flax=ours.arrays, torch=theirs.arrays)


def _output_errors(ours: Result, theirs: Result, single: Result) -> dict[str, float]:
    rounding = tolerance.relative(single.outputs, theirs.outputs)
    found = tolerance.relative(ours.outputs, theirs.outputs)
    return tolerance.conditioned(found, rounding, tolerance.FORWARD)


def _gradient_errors(ours: Result, theirs: Result, singles: Sequence[Result]) -> dict[str, float]:
    reference = theirs.gradients
    low = [tolerance.gradient_errors(single.gradients, reference) for single in singles]
    found = tolerance.gradient_errors(ours.gradients, reference)
    most = tolerance.excesses(reference)
    return tolerance.conditioned(found, _largest(low), tolerance.GRADIENT, most)


def draws(pair: Pair, framework: str, spec: RunSpec, count: int = tolerance.DRAWS) -> list[Result]:
    """Return results in a lower dtype: one rounded to nearest, the others stochastically."""
    specs = [spec]
    for seed in range(1, count):
        specs.append(replace(spec, name=f"{spec.name}, rounding {seed}", rounding_seed=seed))
    return [pair.run(framework, draw) for draw in specs]


def _largest(errors: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: max(own[name] for own in errors) for name in errors[0]}


def _with_gradients(pair: Pair, result: Result) -> Result:
    shared = pair.shared(result.gradients)
    named = {f"gradient of {name}": gradient for name, gradient in shared.items()}
    return replace(result, gradients=named)


def _nonfinite_outputs(reference: Result, extras: Arrays) -> str:
    # Both may agree in letting through what they should not.
    if "lengths" not in extras:
        return ""
    outputs = reference.outputs
    bad = [name for name in sorted(outputs) if _reached(outputs[name], extras["lengths"])]
    return f"PyTorch lets padding reach real tokens of {', '.join(bad)}" if bad else ""


def _reached(output: np.ndarray, lengths: np.ndarray) -> bool:
    """Whether padding reaches a real token of an output, or what is pooled of a row with some."""
    if output.ndim < 2 or len(output) != len(lengths):
        return False
    real = [own[:length] for own, length in zip(output, lengths, strict=True) if length]
    return not all(np.isfinite(tokens).all() for tokens in real)


def _each(pair: Pair, change: Change, otherwise: str = "no input is floating") -> StressInput:
    if not any(is_floating(x) for x in pair.inputs.values()):
        raise NotRun(otherwise)
    inputs = {name: change(x) if is_floating(x) else x for name, x in pair.inputs.items()}
    return StressInput(inputs, dict(pair.extras))


def _tokens(pair: Pair, change: Change) -> StressInput:
    # Floats have an axis of width beside those of rows and tokens.
    if any(x.ndim - is_floating(x) < 2 for x in pair.inputs.values()):
        raise NotRun(
            "tokens are the second axis of floats of rank 3, or of integers of rank 2; an input has"
            " neither"
        )
    return StressInput({name: change(x) for name, x in pair.inputs.items()}, dict(pair.extras))


def _lengths(pair: Pair) -> np.ndarray:
    if not pair.takes("lengths"):
        raise NotRun("the calls take no lengths: give both a call with a keyword `lengths`, (b,)")
    shapes = {x.shape[:2] for x in pair.inputs.values() if x.ndim > 1}
    if len(shapes) != 1:
        raise NotRun(f"lengths are those of one sequence; the inputs have {sorted(shapes)}")
    batch, tokens = shapes.pop()
    if batch == 1:
        return np.array([tokens - 1])
    # From all padding in the first row to none in the last.
    return np.arange(batch) * tokens // max(batch - 1, 1)
