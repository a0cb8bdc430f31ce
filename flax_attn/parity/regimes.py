"""Inputs that are hard on purpose, where ports that agree on easy ones part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flax_attn.parity.pair import NotRun, Pair
from flax_attn.parity.sides.side import Arrays, is_floating

LONG = 193  # tokens: enough for positions to matter, and no multiple of anything


@dataclass(frozen=True)
class Regime:
    """A change of the inputs, and what the call is told beside them."""

    inputs: Arrays
    extras: Arrays


def huge_logits(pair: Pair) -> Regime:
    """Scores of about 1e4: the softmax is a hard choice, and overflows unless the largest is taken off first."""
    return _each(pair, lambda x: 100 * x)


def small_activations(pair: Pair) -> Regime:
    """Activations of 1e-3, beside which the epsilon of a norm is no longer small."""
    return _each(pair, lambda x: 1e-3 * x)


def mean_offset(pair: Pair) -> Regime:
    """A mean of 1e3, which a variance in one pass does not survive."""
    return _each(pair, lambda x: x + 1e3)


def duplicate_tokens(pair: Pair) -> Regime:
    """The first token everywhere: all scores of a row are equal."""
    return _tokens(pair, lambda x: np.repeat(x[:, :1], x.shape[1], axis=1))


def single_token(pair: Pair) -> Regime:
    """One token."""
    return _tokens(pair, lambda x: x[:, :1])


def long_sequence(pair: Pair) -> Regime:
    """Many tokens, all different, so that positions matter."""
    random = np.random.default_rng(pair.seed)

    def lengthen(x):
        more = (x.shape[0], LONG, *x.shape[2:])
        return random.normal(size=more) if is_floating(x) else random.integers(x.min(), x.max() + 1, more)

    return _tokens(pair, lengthen)


def padded_rows(pair: Pair) -> Regime:
    """Rows of different length, the first of them nothing but padding."""
    return Regime(pair.inputs, {**pair.extras, "lengths": _lengths(pair)})


def poisoned_padding(pair: Pair) -> Regime:
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
    return Regime(inputs, {**pair.extras, "lengths": lengths})


REGIMES: dict[str, Callable[[Pair], Regime]] = {
    "huge logits": huge_logits,
    "small activations": small_activations,
    "mean offset": mean_offset,
    "duplicate tokens": duplicate_tokens,
    "single token": single_token,
    "long sequence": long_sequence,
    "padded rows": padded_rows,
    "poisoned padding": poisoned_padding,
}


def _each(pair: Pair, change: Callable[[np.ndarray], np.ndarray]) -> Regime:
    if not any(is_floating(x) for x in pair.inputs.values()):
        raise NotRun("no input is floating")
    inputs = {name: change(x) if is_floating(x) else x for name, x in pair.inputs.items()}
    return Regime(inputs, dict(pair.extras))


def _tokens(pair: Pair, change: Callable[[np.ndarray], np.ndarray]) -> Regime:
    if any(x.ndim < (3 if is_floating(x) else 2) for x in pair.inputs.values()):
        raise NotRun("tokens are the second axis of floats of rank 3, or of integers of rank 2; an input has neither")
    return Regime({name: change(x) for name, x in pair.inputs.items()}, dict(pair.extras))


def _lengths(pair: Pair) -> np.ndarray:
    if not pair.takes("lengths"):
        raise NotRun("the calls take no lengths: give both a call with a keyword `lengths`, (b,)")
    shapes = {x.shape[:2] for x in pair.inputs.values() if x.ndim > 1}
    if len(shapes) != 1:
        raise NotRun(f"lengths are those of one sequence; the inputs have {sorted(shapes)}")
    (batch, tokens) = shapes.pop()
    return np.array([(row * tokens) // max(batch - 1, 1) if batch > 1 else tokens - 1 for row in range(batch)])
