"""The inputs of a comparison, as the caller may give them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flax_attn import convert
from flax_attn.parity.adapters.adapter import Arrays, PairingError, is_floating

Inputs = Any  # a list of arrays or shapes, a mapping of them by name, or one of them


def named_inputs(inputs: Inputs, seed: int) -> Arrays:
    """Return the inputs by name, those given as shapes drawn from the normal distribution.

    Raises:
        PairingError: if they are no arrays of numbers, and no shapes.

    Example:
        >>> {name: array.shape for name, array in named_inputs([(3, 2), [1, 0]], seed=0).items()}
        {'input 0': (3, 2), 'input 1': (2,)}
    """
    if hasattr(inputs, "shape") or (
        isinstance(inputs, tuple) and all(isinstance(size, int) for size in inputs)
    ):
        inputs = [inputs]  # one array, or one shape
    if not isinstance(inputs, Mapping | Sequence) or isinstance(inputs, str) or not inputs:
        got = (
            type(inputs).__name__
            if inputs or not isinstance(inputs, Sequence)
            else f"an empty {inputs!r}"
        )
        raise PairingError(
            f"inputs are a list of arrays or of shapes, or a mapping of them by name; got {got}."
            " Pass [x] for one array x"
        )
    random = np.random.default_rng(seed + 1000)
    named = (
        inputs.items()
        if isinstance(inputs, Mapping)
        else ((f"input {i}", x) for i, x in enumerate(inputs))
    )
    return {name: _array(name, value, random) for name, value in named}


def _array(name: str, value: Any, random: np.random.Generator) -> np.ndarray:
    if isinstance(value, tuple):
        if not all(isinstance(size, int | np.integer) and size >= 0 for size in value):
            raise PairingError(
                f"{name}: a tuple is a shape, of sizes from 0; got {value}. Pass other values as an"
                " array"
            )
        return random.normal(size=value)
    try:
        array = convert.to_numpy(value)
    except (TypeError, ValueError) as error:
        raise PairingError(
            f"{name} is no array of numbers: {error}. Pass an array, or a shape as a tuple"
        ) from error
    if is_floating(array):
        return array.astype(np.float64)
    if array.dtype.kind not in "biu":
        raise PairingError(
            f"{name} is no array of real numbers: its dtype is {array.dtype}. Pass an array, or a"
            " shape as a tuple"
        )
    return array
