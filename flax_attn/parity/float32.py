"""What runs in float64 compute in float64 although a module is written in float32.

PyTorch makes float32 where a call names no dtype, JAX in its attention. Where PyTorch computes in
float32 on purpose, two right ports agree to 1e-7 only, as both round: then both compute in float64.
Where PyTorch does not, float32 that the port names is a difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import AdapterError, Arrays, Float32, NotRun
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.pair import Pair

# How JAX and how PyTorch read float32.
Readings = tuple[Float32, Float32]
PLAIN = Float32.AS_WRITTEN
# Another reading is better where the outputs differ by so much less, and as good by so much more.
CLEARLY = 0.1
NEARLY = 1.01


def choose_float32(pair: Pair) -> None:
    """Have the runs in float64 read float32 so that the outputs agree, or that PyTorch's call runs.

    Where no reading makes them agree, it is the one with which they differ least.
    """
    # The adapters of tests, and recordings, read it in one way.
    if not hasattr(pair.own_torch, "float32") or not isinstance(pair.flax, JaxAdapter):
        return
    ours = _outputs(pair, "flax", PLAIN)
    theirs = {PLAIN: _outputs(pair, "torch", PLAIN)}
    if _error(ours, theirs[PLAIN]) <= tolerance.FORWARD:
        return
    for kind in (Float32.BY_LIBRARY, Float32.NAMED):
        theirs[kind] = _outputs(pair, "torch", kind)
    flax, torch = PLAIN, _first_that_runs(theirs)
    if ours is not None:
        flax, torch = _best(pair, theirs, torch)
    _read(pair, "flax", flax)
    _read(pair, "torch", torch)


def _first_that_runs(theirs: Mapping[Float32, Arrays | None]) -> Float32:
    return next((kind for kind in Float32 if theirs[kind] is not None), PLAIN)


def _best(pair: Pair, theirs: Mapping[Float32, Arrays | None], torch: Float32) -> Readings:
    """Return the first readings with which the outputs agree, else those with the least error."""
    chosen = PLAIN, torch
    least = np.inf
    for readings in _readings(pair, theirs):
        flax, torch = readings
        error = _error(_outputs(pair, "flax", flax), theirs[torch])
        # Where the port differs in something else, what both round is left out of the report.
        as_good = flax is not PLAIN and error <= NEARLY * least
        if error < CLEARLY * least or (as_good and error < np.inf):
            chosen = readings
            least = error
        if error <= tolerance.FORWARD:
            break
    return chosen


def _readings(pair: Pair, theirs: Mapping[Float32, Arrays | None]) -> list[Readings]:
    """Return what both sides may read as float64, the least first."""
    kinds = list(Float32) if _makes_float32(theirs) else [PLAIN]
    flax: Any = pair.flax
    if not flax.makes_float32(pair.uncompiled):
        return list(product([PLAIN], kinds))
    named = [(kind, kind) for kind in kinds if kind is Float32.NAMED]
    return [*product([PLAIN, Float32.BY_LIBRARY], kinds), *named]


def _makes_float32(theirs: Mapping[Float32, Arrays | None]) -> bool:
    """Whether PyTorch computes something in float32 by itself."""
    wide = theirs[Float32.NAMED]
    return wide is not None and _error(theirs[PLAIN], wide) > 0


def _outputs(pair: Pair, framework: str, kind: Float32) -> Arrays | None:
    """Return the outputs in float64 with this reading; None if the call raises."""
    _read(pair, framework, kind)
    try:
        return pair.run(framework, pair.uncompiled).outputs
    # What it raises is told where the module is called.
    except (AdapterError, NotRun):
        return None


def _read(pair: Pair, framework: str, kind: Float32) -> None:
    """Have one side read float32 in this way from here on."""
    adapter: Any = pair.own_torch if framework == "torch" else pair.flax
    if adapter.float32 is kind:
        return
    pair.forget(framework)
    if framework == "torch":
        adapter.float32 = kind
    else:
        pair.flax = adapter.reading(kind)


def _error(ours: Arrays | None, theirs: Arrays | None) -> float:
    """Return the largest error of an output; infinity where they cannot be compared."""
    if ours is None or theirs is None:
        return np.inf
    try:
        errors = tolerance.relative(ours, theirs)
    except ValueError:
        return np.inf
    return max(errors.values(), default=np.inf)
