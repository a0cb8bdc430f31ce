"""Inputs that are hard on purpose, where ports that agree on easy ones part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flax_attn.parity.adapters.adapter import Arrays, is_floating
from flax_attn.parity.pair import NotRun, Pair

LONG = 193  # tokens: enough for positions to matter, and no multiple of anything


@dataclass(frozen=True)
class StressInput:
    """A change of the inputs, and what the call is told beside them."""

    inputs: Arrays
    extras: Arrays


def huge_logits(pair: Pair) -> StressInput:
    """Scores of about 1e4: the softmax is a hard choice, and overflows unless the largest is taken off first."""
    return _each(pair, lambda x: 100 * x)


def small_activations(pair: Pair) -> StressInput:
    """Activations of 1e-3, beside which the epsilon of a norm is no longer small."""
    return _each(pair, lambda x: 1e-3 * x)


def mean_offset(pair: Pair) -> StressInput:
    """A mean of 1e3, which a variance in one pass does not survive."""
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
        more = (x.shape[0], LONG, *x.shape[2:])
        return random.normal(size=more) if is_floating(x) else random.integers(x.min(), x.max() + 1, more)

    return _tokens(pair, lengthen)


def padded_rows(pair: Pair) -> StressInput:
    """Rows of different length, the first of them nothing but padding."""
    return StressInput(pair.inputs, {**pair.extras, "lengths": _lengths(pair)})


def poisoned_padding(pair: Pair) -> StressInput:
    """NaN and infinity where the padding is, which nobody may see."""
    lengths = _lengths(pair)

    def poison(x):
        x = x.copy()
        for row, length in enumerate(lengths):
            x[row, length:] = np.nan if row % 2 else np.inf
        return x

    inputs = {name: poison(x) if is_floating(x) else x for name, x in pair.inputs.items()}
    if not any(is_floating(x) for x in pair.inputs.values()):
        raise NotRun("no input is floating, so none can hold NaN")
    return StressInput(inputs, {**pair.extras, "lengths": lengths})


STRESS_INPUTS: dict[str, Callable[[Pair], StressInput]] = {
    "huge logits": huge_logits,
    "small activations": small_activations,
    "mean offset": mean_offset,
    "duplicate tokens": duplicate_tokens,
    "single token": single_token,
    "long sequence": long_sequence,
    "padded rows": padded_rows,
    "poisoned padding": poisoned_padding,
}


def _each(pair: Pair, change: Callable[[np.ndarray], np.ndarray]) -> StressInput:
    if not any(is_floating(x) for x in pair.inputs.values()):
        raise NotRun("no input is floating")
    inputs = {name: change(x) if is_floating(x) else x for name, x in pair.inputs.items()}
    return StressInput(inputs, dict(pair.extras))


def _tokens(pair: Pair, change: Callable[[np.ndarray], np.ndarray]) -> StressInput:
    if any(x.ndim < (3 if is_floating(x) else 2) for x in pair.inputs.values()):
        raise NotRun("tokens are the second axis of floats of rank 3, or of integers of rank 2; an input has neither")
    return StressInput({name: change(x) for name, x in pair.inputs.items()}, dict(pair.extras))


def _lengths(pair: Pair) -> np.ndarray:
    if not pair.takes("lengths"):
        raise NotRun("the calls take no lengths: give both a call with a keyword `lengths`, (b,)")
    shapes = {x.shape[:2] for x in pair.inputs.values() if x.ndim > 1}
    if len(shapes) != 1:
        raise NotRun(f"lengths are those of one sequence; the inputs have {sorted(shapes)}")
    (batch, tokens) = shapes.pop()
    return np.array([(row * tokens) // max(batch - 1, 1) if batch > 1 else tokens - 1 for row in range(batch)])
