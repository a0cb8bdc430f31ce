"""Which inputs have an effect on the outputs, and whether the parameters have one."""

from __future__ import annotations

from collections.abc import Iterator, Set

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import AdapterError, Arrays, RunSpec, is_floating
from flax_attn.parity.loaded import loaded
from flax_attn.parity.pair import Pair


def without_effect(pair: Pair, varied: Set[str]) -> Iterator[str]:
    """Yield a sentence for each input that changes no output of PyTorch, and for the parameters.

    What has no effect was compared with nothing: a port that leaves it out agrees as well.

    Args:
        pair: pair of modules to check.
        varied: inputs of which a check has tried other values.
    """
    for name, array in pair.inputs.items():
        if name in varied:
            continue
        if _is_constant(array):
            yield f"{name} is {array.flat[0]} everywhere; no other value was tried"
            continue
        inputs = {**pair.inputs, name: changed(array, pair.seed)}
        spec = pair.run_spec(f"effect of {name}", inputs=inputs, eager=True)
        if not _changes(pair, spec):
            yield f"{name} has no effect on the outputs"
    if pair.weights and not _parameters_change(pair):
        yield "the parameters have no effect on the outputs"


def _is_constant(array: np.ndarray) -> bool:
    """Whether an input of whole numbers has one value, so that its places cannot be changed."""
    if is_floating(array) or not array.size:
        return False
    return bool(array.min() == array.max())


def _parameters_change(pair: Pair) -> bool:
    weights = {name: changed(array, pair.seed) for name, array in pair.weights.items()}
    spec = pair.run_spec("effect of the parameters", eager=True)
    with loaded(pair, weights):
        return _changes(pair, spec)


def changed(array: np.ndarray, seed: int) -> np.ndarray:
    """Return the values of an array in other places, floating ones also made smaller at random.

    Their signs and bounds stay, so that what takes the array also takes this.

    Example:
        >>> changed(np.array([[0, 1], [1, 2]]), seed=0)
        array([[0, 0],
               [1, 1]])
    """
    rolled = np.roll(array.ravel(), 1).reshape(array.shape)
    if not is_floating(array):
        # Else their sum stays, and so does all that is pooled.
        others = array[array != rolled.flat[0]]
        rolled.flat[:1] = others[:1]
        return rolled
    # A number times a number is no array in NumPy.
    return np.asarray(rolled * np.random.default_rng(seed).uniform(0.5, 1.0, array.shape))


def _changes(pair: Pair, spec: RunSpec) -> bool:
    try:
        outputs = pair.run("torch", spec).outputs
    # PyTorch reads the values that it refuses.
    except AdapterError:
        return True
    return not _equal(outputs, pair.plain.outputs)


def _equal(ours: Arrays, theirs: Arrays) -> bool:
    if ours.keys() != theirs.keys():
        return False
    return tolerance.within(tolerance.relative(ours, theirs), tolerance.FORWARD)
