"""The inputs of a comparison, as the caller may give them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flax_attn import convert
from flax_attn.parity.adapters.adapter import Arrays, PairingError, is_floating

# Of the numbers that are drawn: more than bfloat16 moves one by, twice.
KINK_MARGIN = 0.0125
# A list of arrays or shapes, a mapping of them by name, or one of them.
Inputs = Any


def named_inputs(inputs: Inputs, seed: int) -> Arrays:
    """Return the inputs by name, those given as shapes drawn from the normal distribution.

    Raises:
        PairingError: if they are no arrays of numbers, and no shapes.

    Example:
        >>> {name: array.shape for name, array in named_inputs([(3, 2), [1, 0]], seed=0).items()}
        {'input 0': (3, 2), 'input 1': (2,)}
    """
    # The seed itself draws the parameters.
    random = np.random.default_rng(seed + 1000)
    values = _by_name(inputs)
    return {name: _array(name, value, random) for name, value in values.items()}


def _by_name(inputs: Inputs) -> Mapping[str, Any]:
    shape = isinstance(inputs, tuple) and all(isinstance(size, int) for size in inputs)
    # One array, or one shape.
    values = [inputs] if shape or hasattr(inputs, "shape") else inputs
    _check(values)
    if isinstance(values, Mapping):
        return values
    return {f"input {i}": value for i, value in enumerate(values)}


def _check(inputs: Inputs) -> None:
    got = type(inputs).__name__
    if isinstance(inputs, Mapping | Sequence) and not isinstance(inputs, str):
        if inputs:
            return
        got = f"an empty {inputs!r}" if isinstance(inputs, Sequence) else got
    raise PairingError(
        f"inputs are a list of arrays or of shapes, or a mapping of them by name; got {got}."
        " Pass [x] for one array x"
    )


def off_kinks(array: np.ndarray) -> np.ndarray:
    """Return numbers that no lower dtype rounds to a multiple of 1/2 other than 0.

    There functions such as a hard tanh have kinks, whose one-sided derivatives are all right.

    Example:
        >>> off_kinks(np.array([0.0, 0.7, 0.999, 1.0]))
        array([0.    , 0.7   , 0.9875, 1.0125])
    """
    kinks = np.round(2 * array) / 2
    margin = KINK_MARGIN * np.abs(kinks)
    side = np.where(np.abs(array) < np.abs(kinks), -1, 1) * np.sign(kinks)
    return np.where(np.abs(array - kinks) < margin, kinks + side * margin, array)


def _array(name: str, value: Any, random: np.random.Generator) -> np.ndarray:
    if isinstance(value, tuple):
        if not all(isinstance(size, int | np.integer) and size >= 0 for size in value):
            raise PairingError(
                f"{name}: a tuple is a shape, of sizes from 0; got {value}. Pass other values as an"
                " array"
            )
        return off_kinks(random.normal(size=value))
    try:
        array = convert.to_numpy(value)
    except (TypeError, ValueError) as error:
        raise PairingError(
            f"{name} is no array of numbers: {error}. Pass an array, or a shape as a tuple"
        ) from error
    # Each run casts them to its own dtype.
    if is_floating(array):
        return array.astype(np.float64)
    if array.dtype.kind not in "biu":
        raise PairingError(
            f"{name} is no array of real numbers: its dtype is {array.dtype}. Pass an array, or a"
            " shape as a tuple"
        )
    return array
