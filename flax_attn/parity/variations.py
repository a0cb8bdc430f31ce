"""Both sides on inputs other than those of the comparison, of the same shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import Arrays
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
    found = {}
    outputs = tolerance.relative(ours.outputs, theirs.outputs)
    for key, error in outputs.items():
        found[f"{name}: {key}"] = error / tolerance.FORWARD
    reference = pair.shared(theirs.gradients)
    gradients = tolerance.gradient_errors(ours.gradients, reference)
    # Of what is not shared the gradients have other names on each side.
    for key, error in gradients.items():
        found[f"{name}: gradient of {key}"] = error / tolerance.GRADIENT
    return found


def are_finite(arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether every number in all of the arrays is finite."""
    return all(np.isfinite(array).all() for array in arrays.values())
