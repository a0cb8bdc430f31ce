"""Runs of a JAX side on inputs that are drawn anew, which tell whether an edit changes anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import Adapter, Result, RunSpec, is_floating
from flax_attn.parity.pair import Pair

# Added to the seed of a pair.
FRESH = 5


class FreshRuns:
    """Runs of a JAX side on other inputs than those of its pair, to compare mutants with it.

    Args:
        pair: pair of modules.
        right: its JAX side, without an edit.
    """

    def __init__(self, pair: Pair, right: Adapter):
        self._runs: list[tuple[RunSpec, Result]] = []
        random = np.random.default_rng(pair.seed + FRESH)
        for more in ((), (0,), (1,), (0, 1)):
            inputs = {name: _redrawn(x, more, random) for name, x in pair.inputs.items()}
            spec = pair.run_spec("fresh", inputs=inputs)
            try:
                outputs = right.run(spec).outputs
            # A module may take inputs of one size alone, and raise what it likes at others.
            except Exception:
                continue
            if any(is_floating(output) for output in outputs.values()):
                spec = replace(spec, cotangents=pair.cotangents_for(outputs))
            self._runs.append((spec, right.run(spec)))

    def equivalent(self, adapter: Adapter) -> bool:
        """Whether an edited side returns the same outputs and gradients."""
        return all(_equal(adapter.run(spec), result) for spec, result in self._runs)


def _redrawn(x: np.ndarray, more: Sequence[int], random: np.random.Generator) -> np.ndarray:
    shape = tuple(size + 3 * (axis in more) for axis, size in enumerate(x.shape))
    if is_floating(x):
        return random.normal(size=shape)
    return random.choice(x.reshape(-1), shape) if x.size else x


def _equal(found: Result, wanted: Result) -> bool:
    errors = tolerance.relative(found.outputs, wanted.outputs)
    gradients = tolerance.gradient_errors(found.gradients, wanted.gradients)
    forward = tolerance.within(errors, tolerance.FORWARD)
    return forward and tolerance.within(gradients, tolerance.GRADIENT)
