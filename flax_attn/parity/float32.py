"""What runs in float64 compute in float64 although a module is written in float32.

PyTorch makes float32 where a call names no dtype, JAX in its attention. Where PyTorch computes in
float32 on purpose, two right ports agree to 1e-7 only, as both round: then both compute in float64.
Where PyTorch does not, float32 that the port names is a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import (
    AdapterError,
    Arrays,
    Float32,
    NotRun,
    error_text,
)
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.adapters.recording import Recording
from flax_attn.parity.pair import Pair

# The outputs of one side by how float32 is read; None where the call raises.
Outputs = Callable[[Float32], Arrays | None]
PLAIN = Float32.AS_WRITTEN


def choose_float32(pair: Pair) -> None:
    """Have the runs in float64 read float32 so that the outputs agree.

    The first reading with which they agree is taken. Where none is found, it is the one that rounds
    least: what both round is then left out of what differs.
    """
    if isinstance(pair.torch, Recording):
        _read(pair, "flax", pair.torch.float32)
        return
    # The adapters of tests read it in one way.
    if not hasattr(pair.own_torch, "float32") or not isinstance(pair.flax, JaxAdapter):
        return
    found: dict[tuple[str, Float32], Arrays | None] = {}

    def ours(kind: Float32) -> Arrays | None:
        return _outputs(pair, "flax", kind, found)

    def theirs(kind: Float32) -> Arrays | None:
        return _outputs(pair, "torch", kind, found)

    chosen = PLAIN, _first_that_runs(theirs)
    error = None
    for flax, torch in _readings(pair, ours, theirs):
        error = largest_error(ours(flax), theirs(torch))
        if error is not None:
            chosen = flax, torch
            if error <= tolerance.FORWARD:
                break
    _read(pair, "flax", chosen[0])
    _read(pair, "torch", chosen[1])
    if error is None or error > tolerance.FORWARD:
        _share_constants(pair)


def _share_constants(pair: Pair) -> None:
    """Give constants that either side holds in float32 the values that the other computes."""
    # It runs both sides operation by operation, which pairs that agree do not need.
    from flax_attn.parity.trace.held_constants import is_rounded, share_constants

    flax: Any = pair.flax
    torch: Any = pair.own_torch
    if not any(map(is_rounded, [*flax.constants, *torch.constants])):
        return
    failure = None
    # Where PyTorch holds float32, the port may name it.
    for kind in dict.fromkeys((flax.float32, Float32.NAMED)):
        _read(pair, "flax", kind)
        for inputs in _with_longer(pair):
            failure = None
            # Other people's modules may fail in any way: the verdict does not depend on them.
            try:
                pair.notes += share_constants(inputs)
            except Exception as error:
                failure = error
            if pair.notes:
                pair.forget("flax")
                pair.forget("torch")
                return
    _read(pair, "flax", flax.float32)
    if failure is not None:
        pair.notes.append(f"constants in float32 were not looked at: {error_text(failure)}")


def _with_longer(pair: Pair) -> Iterator[Pair]:
    """Yield the pair with many tokens, which take more rows of a table, and as it is."""
    from flax_attn.parity.stress import long_sequence

    with suppress(NotRun):
        longer = long_sequence(pair)
        yield pair.with_inputs(longer.inputs, longer.extras)
    yield pair


def _first_that_runs(theirs: Outputs) -> Float32:
    return next((kind for kind in Float32 if theirs(kind) is not None), PLAIN)


def _readings(pair: Pair, ours: Outputs, theirs: Outputs) -> Iterator[tuple[Float32, Float32]]:
    """Yield what JAX and what PyTorch may read as float64, the least first."""
    yield PLAIN, PLAIN
    kinds = list(Float32) if _makes_float32(theirs) else [PLAIN]
    yield from product([PLAIN], kinds)
    flax: Any = pair.flax
    if ours(PLAIN) is None or not flax.makes_float32(pair.uncompiled):
        return
    yield from product([Float32.BY_LIBRARY], kinds)
    # What the port names float32 is a difference, unless PyTorch computes so, too.
    if Float32.NAMED in kinds:
        yield Float32.NAMED, Float32.NAMED


def _makes_float32(theirs: Outputs) -> bool:
    """Whether PyTorch computes something in float32 by itself."""
    error = largest_error(theirs(PLAIN), theirs(Float32.NAMED))
    return error is None or error > 0


def _outputs(
    pair: Pair,
    framework: str,
    kind: Float32,
    found: dict[tuple[str, Float32], Arrays | None],
) -> Arrays | None:
    """Return the outputs in float64 with this reading, which are kept; None if the call raises."""
    if (framework, kind) not in found:
        _read(pair, framework, kind)
        try:
            found[framework, kind] = pair.run(framework, pair.uncompiled).outputs
        # What it raises is told where the module is called.
        except (AdapterError, NotRun):
            found[framework, kind] = None
    return found[framework, kind]


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


def largest_error(ours: Arrays | None, theirs: Arrays | None) -> float | None:
    """Return the largest error of an output, infinite where shapes differ; None without outputs."""
    if ours is None or theirs is None:
        return None
    try:
        errors = tolerance.relative(ours, theirs)
    except ValueError:
        return np.inf
    return max(errors.values(), default=np.inf)
