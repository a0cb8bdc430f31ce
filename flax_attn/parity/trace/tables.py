"""Tables of constants that a side holds in float32, such as rotary angles made at construction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace.hooks import ROOT

LOW = ("bfloat16", "float16", "float32")


def dtype_of_numbers(value: np.ndarray) -> str:
    """Return the lowest dtype that holds all numbers of an array in float64.

    Example:
        >>> [dtype_of_numbers(np.array([x], np.float64)) for x in (0.5, np.float32(0.1), 0.1)]
        ['bfloat16', 'float32', 'float64']
    """
    value = value[np.isfinite(value)]
    with np.errstate(over="ignore"):
        fits = (
            kind
            for kind in LOW
            if (value.astype(jnp.dtype(kind)).astype(np.float64) == value).all()
        )
        return next(fits, "float64")


def tables_of_flax(pair: Pair, constants: Sequence[Any]) -> frozenset[int]:
    """Return which constants of a traced module are tables of float32 numbers, and no parameters.

    Whole numbers, masks and the like are exact in lower dtypes as well, and are none.
    """
    if pair.has_parameters and not pair.entries:
        return frozenset()  # parameters may be in float32, and cannot be told from tables
    weights = {
        _numbers(part)
        for entry in pair.entries
        for part in entry.split(pair.weights[entry.theirs]).values()
    }
    arrays = (
        (i, np.asarray(array)) for i, array in enumerate(constants) if getattr(array, "size", 0) > 1
    )
    found = {i: x.astype(np.float64) for i, x in arrays if x.dtype.kind == "f"}
    return frozenset(
        i
        for i, x in found.items()
        if dtype_of_numbers(x) == "float32" and _numbers(x) not in weights
    )


def tables_of_torch(pair: Pair, tensors: Arrays, shared: Iterable[str]) -> set[str]:
    """Return the paths of the innermost shared submodules that hold a table of float32 numbers.

    Args:
        pair: pair of modules that is compared.
        tensors: the parameters and buffers of the PyTorch module, in float64.
        shared: paths of the PyTorch submodules that have a counterpart.
    """
    if pair.has_parameters and not pair.entries:
        return set()
    paths, weights = set(shared), {entry.theirs for entry in pair.entries}
    low = (
        name
        for name, x in tensors.items()
        if name not in weights and x.size > 1 and dtype_of_numbers(x) == "float32"
    )
    return {_within(name, paths) for name in low}


def _within(name: str, paths: set[str]) -> str:
    while name and name not in paths:
        name = name.rpartition(".")[0]
    return name or ROOT


def _numbers(x: np.ndarray) -> bytes:
    return np.sort(np.asarray(x, np.float64), axis=None).tobytes()
