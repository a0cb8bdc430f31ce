"""Both sides on inputs other than those of the comparison, of the same shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import Arrays, Result
from flax_attn.parity.pair import Pair


def excesses(pair: Pair, name: str, inputs: Arrays) -> dict[str, float]:
    """Return the errors of outputs and gradients over their rules, on other inputs.

    Args:
        pair: pair of modules to check.
        name: name of the run, which stands before those of the tensors.
        inputs: inputs of the same shapes, for which JAX compiles nothing again.
    """
    spec = replace(pair.float64, name=name, inputs=inputs)
    ours, theirs = pair.both(spec)
    errors = outputs_over_rule(ours.outputs, theirs.outputs)
    errors |= gradients_over_rule(pair, ours, theirs)
    return {f"{name}: {key}": error for key, error in errors.items()}


def outputs_over_rule(ours: Arrays, theirs: Arrays) -> dict[str, float]:
    """Return the errors of outputs over their rule: at most 1 passes."""
    errors = tolerance.relative(ours, theirs)
    return {name: error / tolerance.FORWARD for name, error in errors.items()}


def gradients_over_rule(pair: Pair, ours: Result, theirs: Result) -> dict[str, float]:
    """Return the errors of shared gradients over their rule: at most 1 passes."""
    # Of what is not shared the gradients have other names on each side.
    reference = pair.shared(theirs.gradients)
    errors = tolerance.gradient_errors(ours.gradients, reference)
    return {f"gradient of {name}": error / tolerance.GRADIENT for name, error in errors.items()}


def are_finite(arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether every number in all of the arrays is finite."""
    return all(np.isfinite(array).all() for array in arrays.values())
