"""The check of masks: inputs of two values, in several kinds that hide something from every one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import AdapterError, Arrays, NotRun, Untested, is_floating
from flax_attn.parity.check import Check, worst_of
from flax_attn.parity.effects import changed
from flax_attn.parity.ids import tables
from flax_attn.parity.pair import Pair
from flax_attn.parity.variations import are_finite, excesses


def masks(pair: Pair) -> Check:
    """Outputs and gradients under masks of several kinds, one input at a time."""
    names = mask_inputs(pair)
    if not names:
        raise NotRun("no input is a mask: of booleans, or of 0 and 1")
    errors = {}
    covers = []
    untested = []
    for name in names:
        tried = {}
        for kind, mask in _kinds(pair, name):
            run = f"{name}, {kind}"
            inputs = {**pair.inputs, name: mask}
            outputs = _outputs_of_torch(pair, run, inputs)
            if outputs is None:
                untested.append(
                    f"{run}: PyTorch refuses it, or returns numbers that are not finite"
                )
                continue
            tried[kind] = outputs
            errors |= excesses(pair, run, inputs)
        if tried and not _differ(list(tried.values())):
            untested.append(f"{name} has no effect on the outputs")
        covers.append(f"{name} as {', '.join(tried) or 'given'}")
    if not errors:
        raise Untested("; ".join(untested))
    check = worst_of("masks", errors, 1.0)
    return replace(check, covers=tuple(covers), untested=tuple(untested))


def mask_inputs(pair: Pair) -> list[str]:
    """Return the names of the inputs that are masks."""
    ids = tables(pair)
    return [name for name, array in pair.inputs.items() if name not in ids and _is_mask(array)]


def _is_mask(array: np.ndarray) -> bool:
    if array.ndim == 0 or array.shape[-1] < 2 or not array.size:
        return False
    binary = array.dtype.kind in "iu" and array.ndim > 1 and np.isin(array, (0, 1)).all()
    return array.dtype == bool or bool(binary)


def _kinds(pair: Pair, name: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield masks that leave something visible to everyone, also behind a causal mask."""
    given = pair.inputs[name]
    hides = _hiding_value(pair, name)
    row, column = np.indices((given.shape[-2] if given.ndim > 1 else 1, given.shape[-1]))
    random = np.random.default_rng(pair.seed)
    chosen = random.random(given.shape) < 0.5
    # Everyone sees the first, and itself.
    own = (column == 0) | (column == row) & (row.shape[0] == row.shape[1])
    hidden = {"random": chosen & ~own}
    if given.ndim > 1:
        hidden["lower triangle"] = column > row
    hidden["one hidden column"] = column == given.shape[-1] // 2
    for kind, where in hidden.items():
        where = np.broadcast_to(where.reshape(where.shape[-given.ndim :]), given.shape)
        yield kind, np.where(where, hides, not hides).astype(given.dtype)


def _hiding_value(pair: Pair, name: str) -> bool:
    """Return the value that hides: under it, another first token changes fewer outputs."""
    given = pair.inputs[name]
    moved = {}
    for key, array in pair.inputs.items():
        moved[key] = array if key == name else _first_changed(array, given.shape[-1], pair.seed)
    count = {}
    for value in (False, True):
        mask = np.full_like(given, not value)
        mask[..., 0] = value
        both = []
        for label, inputs in (("as given", pair.inputs), ("another first token", moved)):
            run = f"{name}, first column {value}, {label}"
            spec = pair.run_spec(run, inputs={**inputs, name: mask}, eager=True)
            try:
                both.append(pair.run("torch", spec).outputs)
            except AdapterError:
                # In a mask of integers, 0 hides.
                return False
        count[value] = _count_changed(*both)
    return count[True] < count[False]


def _first_changed(array: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Return an array with other values for the first token, on the axis that has this size."""
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
    try:
        outputs = pair.run("torch", replace(pair.float64, name=run, inputs=inputs)).outputs
    except AdapterError:
        return None
    # Where someone sees nothing, ports may differ: `padded rows` judges that.
    return outputs if are_finite(outputs) else None


def _differ(found: list[Arrays]) -> bool:
    first, *others = found
    for outputs in others:
        if max(tolerance.relative(outputs, first).values(), default=0.0) > tolerance.FORWARD:
            return True
    return False
