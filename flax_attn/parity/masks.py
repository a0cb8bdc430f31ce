"""The check of masks: inputs of two values, in several kinds that hide something from every one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import AdapterError, Arrays, NotRun, Untested, is_floating
from flax_attn.parity.check import Check, Situation, worst_of
from flax_attn.parity.effects import changed
from flax_attn.parity.ids import tables
from flax_attn.parity.pair import Pair
from flax_attn.parity.variations import are_finite, excesses


def masks(pair: Pair) -> Check:
    """Outputs and gradients under masks of several kinds, one input at a time."""
    names = mask_inputs(pair)
    if not names:
        raise NotRun("no input is a mask: of booleans, or of 0 and 1")
    errors: dict[str, float] = {}
    seen: dict[str, Situation] = {}
    covers = []
    untested: list[str] = []
    for name in names:
        tried = _tried(pair, name, errors, seen, untested)
        kinds = ", ".join(tried)
        if kinds:
            phrase = f"{name} as {kinds}"
            covers.append(phrase)
    if not errors:
        reasons = "; ".join(untested)
        raise Untested(reasons)
    check = worst_of("masks", errors, 1.0)
    check = check.with_coverage(covers, untested)
    return replace(check, seen=seen.get(check.worst))


def _tried(
    pair: Pair,
    name: str,
    errors: dict[str, float],
    seen: dict[str, Situation],
    untested: list[str],
) -> list[str]:
    """Return the kinds of one mask that were compared; add their errors, and what was not."""
    found = {}
    for kind, mask in _kinds(pair, name):
        run = f"{name}, {kind}"
        inputs = {**pair.inputs, name: mask}
        outputs = _outputs_of_torch(pair, run, inputs)
        if outputs is None:
            untested.append(f"{run}: PyTorch refuses it, or returns numbers that are not finite")
            continue
        found[kind] = outputs
        excess = excesses(pair, run, inputs)
        errors |= excess
        seen |= dict.fromkeys(excess, Situation(inputs, pair.extras))
    if found and not _differ(list(found.values())):
        untested.append(f"{name} has no effect on the outputs")
    return list(found)


def mask_inputs(pair: Pair) -> list[str]:
    """Return the names of the inputs that are masks."""
    ids = tables(pair)
    return [name for name, array in pair.inputs.items() if name not in ids and _is_mask(array)]


def _is_mask(array: np.ndarray) -> bool:
    if array.ndim == 0 or array.shape[-1] < 2 or not array.size:
        return False
    if array.dtype == bool:
        return True
    # Whole numbers of one axis are ids or labels more often.
    binary = array.dtype.kind in "iu" and array.ndim > 1 and np.isin(array, (0, 1)).all()
    return bool(binary)


def _kinds(pair: Pair, name: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield masks that leave something visible to everyone, also behind a causal mask."""
    given = pair.inputs[name]
    hides = _hiding_value(pair, name)
    for kind, hidden in _hidden(given.shape, pair.seed):
        mask = np.where(hidden, hides, not hides)
        yield kind, mask.astype(given.dtype)


def _hidden(shape: tuple[int, ...], seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield where each kind of mask hides; everyone sees the first, and itself."""
    columns = shape[-1]
    rows = shape[-2] if len(shape) > 1 else 1
    row, column = np.indices((rows, columns))
    seen = column == 0
    if rows == columns:
        seen |= column == row
    random = np.random.default_rng(seed)
    chosen = random.random(shape) < 0.5
    if len(shape) == 1:
        (seen,) = seen
    yield "random", chosen & ~seen
    if rows > 1:
        yield "lower triangle", np.broadcast_to(column > row, shape)
    middle = column[0] == columns // 2
    yield "one hidden column", np.broadcast_to(middle, shape)


def _hiding_value(pair: Pair, name: str) -> bool:
    """Return the value that hides: under it, another first token changes fewer outputs."""
    given = pair.inputs[name]
    size = given.shape[-1]
    moved = {key: _first_changed(array, size, pair.seed) for key, array in pair.inputs.items()}
    changes = {}
    for value in (False, True):
        # The first column has the value, and no other one.
        mask = np.full_like(given, not value)
        mask[..., 0] = value
        run = f"{name}, first column {value}"
        try:
            before = _plain_outputs(pair, f"{run}, as given", {**pair.inputs, name: mask})
            after = _plain_outputs(pair, f"{run}, another first token", {**moved, name: mask})
        except AdapterError:
            # In a mask of integers, 0 hides.
            return False
        changes[value] = _count_changed(before, after)
    return changes[True] < changes[False]


def _plain_outputs(pair: Pair, run: str, inputs: Arrays) -> Arrays:
    spec = pair.run_spec(run, inputs=inputs, eager=True)
    return pair.run("torch", spec).outputs


def _first_changed(array: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Return an array with other values for the first token, on the axis that has this size."""
    # The first axis is the batch, whatever its size is.
    axes = [axis for axis, length in enumerate(array.shape) if length == size and axis]
    if not axes:
        return array
    tokens = np.moveaxis(array.copy(), axes[0], 0)
    tokens[0] = changed(tokens, seed)[0] if is_floating(array) else tokens[1]
    return np.moveaxis(tokens, 0, axes[0])


def _count_changed(ours: Arrays, theirs: Arrays) -> int:
    count = 0
    for name, array in ours.items():
        close = np.isclose(array, theirs[name], rtol=0, atol=1e-12, equal_nan=True)
        count += int((~close).sum())
    return count


def _outputs_of_torch(pair: Pair, run: str, inputs: Arrays) -> Arrays | None:
    spec = replace(pair.float64, name=run, inputs=inputs)
    try:
        outputs = pair.run("torch", spec).outputs
    except AdapterError:
        return None
    # Where someone sees nothing, ports may differ: `padded rows` judges that.
    return outputs if are_finite(outputs) else None


def _differ(found: list[Arrays]) -> bool:
    first, *others = found
    for outputs in others:
        errors = tolerance.relative(outputs, first)
        if not tolerance.within(errors, tolerance.FORWARD):
            return True
    return False
