"""The check of other shapes: lengths, pixels and batches that PyTorch takes as well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import AdapterError, Arrays, NotRun, RunSpec, is_floating
from flax_attn.parity.check import Check, any_finite, worst_of
from flax_attn.parity.pair import Pair

# New sizes, by the name of an input and the place of its axis.
Sizes = dict[tuple[str, int], int]
# Shapes that are compared, at most: JAX compiles each of them.
MOST = 4


@dataclass(frozen=True)
class Axes:
    """The axes of one size, which are as a rule one: tokens of queries, keys and a mask."""

    size: int
    places: tuple[tuple[str, int], ...]

    def together(self, size: int) -> Sizes:
        """Return a new size for all of them."""
        return dict.fromkeys(self.places, size)

    def alone(self, size: int) -> Iterator[Sizes]:
        """Yield a new size for each of them."""
        yield from ({place: size} for place in self.places)


def other_shapes(pair: Pair) -> Check:
    """Outputs in float64 on inputs of other sizes: those that PyTorch takes.

    Every free axis is doubled in one call. In another one, each that is not the first is longer by
    one, alone where it may be: an image that is not square, a length that no number divides.
    """
    groups = list(_groups(pair))
    free = [sizes for axes in groups for sizes in _free(pair, axes)]
    if not free:
        raise NotRun("PyTorch takes inputs of these sizes only")
    errors = {}
    notes = []
    untested = []
    shapes = _joined(pair, free)
    uneven = [sizes for axes in groups for sizes in _uneven(pair, axes) if sizes not in free]
    for sizes in [*shapes, *_joined(pair, uneven)][:MOST]:
        spec = _spec(pair, sizes)
        shape = spec.name.partition(": ")[2]
        try:
            found = tolerance.relative(
                pair.run("flax", spec).outputs, pair.run("torch", spec).outputs
            )
            errors |= {f"{name} of {shape}": error for name, error in found.items()}
        except AdapterError as error:
            refusal = f"PyTorch takes {shape}, and {error}"
            # A port may well refuse what a model would never be given.
            if sizes in shapes:
                errors[shape] = np.inf
                notes.append(refusal)
            else:
                untested.append(refusal)
    check = worst_of("other shapes", errors, tolerance.FORWARD, "; ".join(notes))
    covers = tuple(key.partition(" of ")[2] for key in errors if " of " in key)
    return replace(check, covers=tuple(dict.fromkeys(covers)), untested=tuple(untested))


def _groups(pair: Pair) -> Iterator[Axes]:
    places: dict[int, list[tuple[str, int]]] = {}
    for name, array in _arrays(pair).items():
        for axis, size in enumerate(array.shape):
            places.setdefault(size, []).append((name, axis))
    # Nothing can be repeated to fill an axis of size 0.
    yield from (Axes(size, tuple(places[size])) for size in places if size)


def _arrays(pair: Pair) -> Arrays:
    rows = {name: array for name, array in pair.extras.items() if name == "lengths"}
    return {**pair.inputs, **rows}


def _free(pair: Pair, axes: Axes) -> list[Sizes]:
    """Return the first new size that PyTorch takes: of all axes of a size, else of one of them."""
    for size in (2 * axes.size, axes.size + 1, axes.size - 1):
        for sizes in (axes.together(size), *axes.alone(size)):
            if size and _takes(pair, sizes):
                return [sizes]
    return []


def _uneven(pair: Pair, axes: Axes) -> list[Sizes]:
    """Return one more for one axis, or for all where PyTorch takes that alone; nothing of rows."""
    if any(axis == 0 for _, axis in axes.places):
        return []
    size = axes.size + 1
    for sizes in (*axes.alone(size), axes.together(size)):
        if _takes(pair, sizes):
            return [sizes]
    return []


def _joined(pair: Pair, parts: list[Sizes]) -> list[Sizes]:
    """Return all new sizes in one, where PyTorch takes that."""
    whole: Sizes = {}
    for part in parts:
        whole |= part
    return [whole] if whole and _takes(pair, whole) else parts


def _takes(pair: Pair, sizes: Sizes) -> bool:
    try:
        outputs = pair.run("torch", _spec(pair, sizes)).outputs
    except AdapterError:
        return False
    return any_finite(outputs) and outputs.keys() == pair.plain.outputs.keys()


def _spec(pair: Pair, sizes: Sizes) -> RunSpec:
    arrays = _arrays(pair)
    shapes = []
    for name, array in arrays.items():
        own = {axis: size for (other, axis), size in sizes.items() if other == name}
        if own:
            arrays[name] = _resized(array, own, pair.seed)
            shapes.append(f"{name} {arrays[name].shape}")
    inputs = {name: arrays[name] for name in pair.inputs}
    extras = {name: arrays.get(name, extra) for name, extra in pair.extras.items()}
    return pair.run_spec(f"other shapes: {', '.join(shapes)}", inputs=inputs, extras=extras)


def _resized(array: np.ndarray, sizes: dict[int, int], seed: int) -> np.ndarray:
    """Return an array with its values repeated, floating ones made smaller at random."""
    for axis, size in sizes.items():
        array = np.take(array, np.arange(size) % array.shape[axis], axis=axis)
    if not is_floating(array):
        return array
    return array * np.random.default_rng(seed).uniform(0.5, 1.0, array.shape)
