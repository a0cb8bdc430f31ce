"""The checks of a case, from the cheapest to the dearest. Each returns what it measured beside its rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx

from flax_attn import convert
from flax_attn.parity import tolerance
from flax_attn.parity.cases import Case
from flax_attn.parity.pair import Pair
from flax_attn.parity.trajectory import train


@dataclass(frozen=True)
class Check:
    """One measurement: `error` must be at most `limit`.

    Args:
        name: of the check.
        error: what was measured; infinite where the two sides cannot even be compared.
        limit: the rule.
        worst: the tensor with the largest error.
        note: what else a reader should know, such as directions left out.
    """

    name: str
    error: float
    limit: float
    worst: str = ""
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the rule holds; NaN never passes."""
        return bool(self.error <= self.limit)

    @property
    def margin(self) -> float:
        """How many times the error fits into the limit."""
        return self.limit / self.error if self.error else np.inf


def forward(pair: Pair) -> Check:
    """Outputs in float64 (rule 2)."""
    return _check("forward", tolerance.relative(pair.flax64.outputs, pair.truth.outputs), tolerance.FORWARD)


def gradients(pair: Pair) -> Check:
    """Gradients of every parameter and input in float64, under random cotangents (rule 2)."""
    errors = tolerance.gradient_errors(pair.flax64.gradients, pair.truth.gradients)
    null = sorted(tolerance.null_directions(pair.truth.gradients))
    note = f"does not feel {', '.join(null)}" if null else ""
    return _check("gradients", errors, tolerance.GRADIENT, note)


def float32(pair: Pair) -> Check:
    """Outputs and gradients in float32, against PyTorch's own error in float32 (rule 4)."""
    ours, theirs, truth = pair.run_flax("float32"), pair.run_torch("float32", gradients=True), pair.truth
    null, eps = tolerance.null_directions(truth.gradients), float(np.finfo(np.float32).eps)
    felt = {name: gradient for name, gradient in truth.gradients.items() if name not in null}
    errors = tolerance.lower_dtype(ours.outputs, theirs.outputs, truth.outputs, tolerance.LOW_FORWARD, eps)
    errors |= tolerance.lower_dtype(ours.gradients, theirs.gradients, felt, tolerance.LOW_GRADIENT, eps)
    return _check("float32", errors, 1.0)


def eager(pair: Pair) -> Check:
    """Compiled and eager execution of the Flax side (rule 5)."""
    outputs = pair.run_flax(gradients=False, jit=False).outputs
    return _check("jit = eager", tolerance.relative(outputs, pair.flax64.outputs), tolerance.FORWARD)


def dropout(pair: Pair) -> Check | None:
    """Outputs and gradients in train mode, both sides given the same dropout key; None where nothing is dropped."""
    if not pair.has_dropout:
        return None
    pair.train()
    try:
        ours, truth = pair.run_flax(), pair.run_torch(gradients=True)
    finally:
        pair.train(False)
    errors = tolerance.relative(ours.outputs, truth.outputs) | tolerance.gradient_errors(
        ours.gradients, truth.gradients
    )
    if np.allclose(truth.outputs["output"], pair.truth.outputs["output"]):
        errors["nothing was dropped"] = np.inf
    return _check("dropout", errors, tolerance.GRADIENT)


def unbatched(pair: Pair) -> Check | None:
    """Inputs without the batch axis, on both sides; None where the case needs one."""
    if not pair.case.unbatched:
        return None
    inputs = [x[0] for x in pair.inputs]
    ours, truth = pair.run_flax(inputs=inputs, gradients=False), pair.run_torch(inputs=inputs)
    errors = tolerance.relative(ours.outputs, truth.outputs)
    rows = {f"{name}, row 0 of the batch": output[0] for name, output in pair.truth.outputs.items()}
    errors |= tolerance.relative({f"{name}, row 0 of the batch": x for name, x in ours.outputs.items()}, rows)
    return _check("unbatched", errors, tolerance.FORWARD)


def layouts(pair: Pair) -> Check | None:
    """Round trip, bit for bit, and an index probe of every layout that can hold the module; None without parameters."""
    if not pair.has_parameters:
        return None
    errors, held = {}, []
    for layout in convert.LAYOUTS:
        try:
            weights = convert.state_dict(pair.flax, layout)
        except convert.ConversionError:
            continue  # this layout says that it cannot hold the module: the note lists those that can
        held.append(layout)
        errors |= {f"{layout}: {name}": wrong for name, wrong in _probe(pair.flax, layout, weights)}
    return _check("layouts", errors, 0.0, ", ".join(held))


def _probe(module: nnx.Module, layout: str, weights: dict[str, np.ndarray]) -> Iterator[tuple[str, float]]:
    # Number every element of every entry, load, and store again: a lost, doubled or moved element comes back changed.
    # Then the numbers inside the module: each must be there once.
    numbers, start = {}, 1
    for name, array in weights.items():
        numbers[name] = np.arange(start, start + array.size, dtype=array.dtype).reshape(array.shape)
        start += array.size
    copy = nnx.clone(module)
    for entries in (weights, numbers):
        convert.load_state_dict(copy, entries, layout)
        again = convert.state_dict(copy, layout)
        for name, array in entries.items():
            yield name, float((again[name] != array).sum())
    held = np.sort(np.concatenate([np.ravel(p) for p in jax.tree.leaves(nnx.state(copy, nnx.Param))]))
    yield "every element once", float((held != np.arange(1, start)).sum())


def training(pair: Pair) -> Check | None:
    """Losses and parameters over 100 steps of AdamW in float64 (rule 3); None without parameters."""
    if not pair.has_parameters:
        return None
    ours, truth = train(pair)
    null = tolerance.null_directions(pair.truth.gradients)
    errors = tolerance.relative(ours, {name: value for name, value in truth.items() if name not in null})
    return _check("training", errors, tolerance.TRAINING)


CHECKS: tuple[Callable[[Pair], Check | None], ...] = (
    forward,
    gradients,
    float32,
    eager,
    dropout,
    unbatched,
    layouts,
    training,
)


def climb(case: Case, seed: int = 0) -> list[Check]:
    """Return every check of a case that applies to it, made on the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        pair = Pair(case, seed)
        return [check for check in (rung(pair) for rung in CHECKS) if check is not None]


def _check(name: str, errors: dict[str, float], limit: float, note: str = "") -> Check:
    worst = max(errors, key=lambda name: (np.isnan(errors[name]), errors[name]))
    return Check(name, float(errors[worst]), limit, worst, note)
