"""The check of other shapes: lengths, pixels and batches that PyTorch takes as well."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import AdapterError, Arrays, NotRun, RunSpec, is_floating
from flax_attn.parity.check import Check, Situation, any_finite, worst_of
from flax_attn.parity.pair import Pair

# The name of an input, and the number of an axis.
Place = tuple[str, int]
# New sizes of axes.
Sizes = dict[Place, int]
# Shapes that are compared, at most: JAX compiles each of them.
MOST = 4
# What stands before the shapes in the name of a run.
_PREFIX = "other shapes: "


@dataclass(frozen=True)
class Axes:
    """The axes of one size, which are as a rule one: tokens of queries, keys and a mask."""

    size: int
    places: tuple[Place, ...]

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
    free, uneven = [], []
    for axes in groups:
        free += _free(pair, axes)
    if not free:
        raise NotRun("PyTorch takes inputs of these sizes only")
    for axes in groups:
        uneven += [sizes for sizes in _uneven(pair, axes) if sizes not in free]
    errors: dict[str, float] = {}
    seen: dict[str, Situation] = {}
    covers = []
    notes = []
    untested = []
    doubled = _joined(pair, free)
    tried = [*doubled, *_joined(pair, uneven)][:MOST]
    for sizes in tried:
        spec = _spec(pair, sizes)
        shape = spec.name.removeprefix(_PREFIX)
        try:
            found = _errors(pair, spec, shape)
            errors |= found
            seen |= dict.fromkeys(found, Situation(spec.inputs, spec.extras))
            covers.append(shape)
        except AdapterError as error:
            refusal = f"PyTorch takes {shape}, and {error}"
            unread = _unread(pair, sizes)
            read = {place: size for place, size in sizes.items() if place not in unread}
            if unread and read:
                tried.append(read)
                doubled.append(read)
            # A port may well refuse what a model would never be given.
            if sizes in doubled and not unread:
                errors[shape] = np.inf
                notes.append(refusal)
            else:
                untested.append(refusal)
    check = worst_of("other shapes", errors, tolerance.FORWARD, "; ".join(notes))
    return replace(check.with_coverage(covers, untested), seen=seen.get(check.worst))


def _errors(pair: Pair, spec: RunSpec, shape: str) -> dict[str, float]:
    # Not `both`: PyTorch takes these shapes, so that one that raises is JAX.
    ours = pair.run("flax", spec).outputs
    theirs = pair.run("torch", spec).outputs
    errors = tolerance.relative(ours, theirs)
    return {f"{name} of {shape}": error for name, error in errors.items()}


def _groups(pair: Pair) -> Iterator[Axes]:
    places: defaultdict[int, list[Place]] = defaultdict(list)
    for name, array in _arrays(pair).items():
        for axis, size in enumerate(array.shape):
            places[size].append((name, axis))
    # Nothing can be repeated to fill an axis of size 0.
    places.pop(0, None)
    yield from (Axes(size, tuple(axes)) for size, axes in places.items())


def _arrays(pair: Pair) -> Arrays:
    rows = {name: array for name, array in pair.extras.items() if name == "lengths"}
    return {**pair.inputs, **rows}


def _free(pair: Pair, axes: Axes) -> list[Sizes]:
    """Return the first new size that PyTorch takes: of all axes of a size, else of one of them."""
    for size in (2 * axes.size, axes.size + 1, axes.size - 1):
        # Nothing is left of an axis of size 1 that is shorter by one.
        taken = _first_taken(pair, [axes.together(size), *axes.alone(size)]) if size else []
        if taken:
            return taken
    return []


def _uneven(pair: Pair, axes: Axes) -> list[Sizes]:
    """Return one more for one axis, or for all where PyTorch takes that alone; nothing of rows."""
    if any(axis == 0 for _, axis in axes.places):
        return []
    longer = axes.size + 1
    return _first_taken(pair, [*axes.alone(longer), axes.together(longer)])


def _first_taken(pair: Pair, candidates: list[Sizes]) -> list[Sizes]:
    """Return the first new sizes that PyTorch takes, alone in a list; nothing if it takes none."""
    for sizes in candidates:
        if _takes(pair, sizes):
            return [sizes]
    return []


def _joined(pair: Pair, parts: list[Sizes]) -> list[Sizes]:
    """Return all new sizes in one, where PyTorch takes that."""
    whole: Sizes = {}
    for part in parts:
        whole |= part
    return [whole] if whole and _takes(pair, whole) else parts


def _unread(pair: Pair, sizes: Sizes) -> set[Place]:
    """Return the axes of which PyTorch does not read what is longer, such as half a patch."""
    spec = _spec(pair, sizes)
    longer = [place for place, size in sizes.items() if _is_longer(pair, *place, size)]
    return {place for place in longer if not _is_read(pair, spec, *place)}


def _is_longer(pair: Pair, name: str, axis: int, size: int) -> bool:
    """Whether an axis of an input of floats is longer than that of the pair."""
    array = pair.inputs.get(name)
    return array is not None and is_floating(array) and size > array.shape[axis]


def _is_read(pair: Pair, spec: RunSpec, name: str, axis: int) -> bool:
    """Whether the outputs of PyTorch change with what an axis is longer by."""
    changed = spec.inputs[name].copy()
    beyond = np.moveaxis(changed, axis, 0)[pair.inputs[name].shape[axis] :]
    beyond += 1.0
    inputs = {**spec.inputs, name: changed}
    other = replace(spec, name=f"{spec.name}, {name} beyond axis {axis}", inputs=inputs)
    before, after = (pair.run("torch", one).outputs for one in (spec, other))
    return not all(np.array_equal(after[key], before[key]) for key in before)


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
        if not own:
            continue
        resized = _resized(array, own, pair.seed)
        arrays[name] = resized
        shapes.append(f"{name} {resized.shape}")
    inputs = {name: arrays[name] for name in pair.inputs}
    extras = {name: arrays.get(name, extra) for name, extra in pair.extras.items()}
    name = _PREFIX + ", ".join(shapes)
    return pair.run_spec(name, inputs=inputs, extras=extras)


def _resized(array: np.ndarray, sizes: dict[int, int], seed: int) -> np.ndarray:
    """Return an array with its values repeated, floating ones made smaller at random."""
    for axis, size in sizes.items():
        array = np.take(array, np.arange(size) % array.shape[axis], axis=axis)
    if not is_floating(array):
        return array
    # Else a repeated row would be the same token once more.
    random = np.random.default_rng(seed)
    return array * random.uniform(0.5, 1.0, array.shape)
