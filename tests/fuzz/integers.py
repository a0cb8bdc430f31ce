"""Integers as a caller may pass them: of every type, small ones and the ends of 64 bits."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

NARROW = ("int8", "int16", "int32", "uint8", "uint16", "uint32")
DTYPES = (*NARROW, "int64", "uint64")
ENDS = tuple(
    sign * 2**bits + d for bits in (7, 8, 15, 16, 30, 31) for sign in (-1, 1) for d in (-1, 0)
)
FAR = (*ENDS, 2**32 - 1, 2**40, -(2**40), 2**62, 2**63 - 1, -(2**63), 2**64 - 1)


@dataclass(frozen=True)
class Integers:
    """Some integers, and how they are passed.

    Args:
        name: role of the integers, unique in a case.
        values: array of Python integers, which have no bounds.
        form: `"int"`, `"scalar"` of NumPy, an array of `"numpy"`, or one of `"jax"`, which a
            compiled call gets as an argument.
        dtype: dtype of all forms except `"int"`.
    """

    name: str
    values: np.ndarray
    form: str
    dtype: str

    def array(self) -> Any:
        """Return what is passed, an array of NumPy where it becomes one of JAX."""
        if self.form == "int":
            return int(self.values)
        array = self.values.astype(self.dtype)
        return array[()] if self.form == "scalar" else np.asarray(array)

    @property
    def narrow(self) -> bool:
        """Whether JAX holds them without its 64-bit mode: others it may refuse."""
        return all(-(2**31) <= value < 2**31 for value in self.values.reshape(-1))

    def __str__(self) -> str:
        values = self.values.tolist()
        kind = {"scalar": "np", "numpy": "np.array", "jax": "jnp.array"}.get(self.form)
        text = str(values) if self.values.size < 20 else f"<{self.values.shape}>"
        return text if kind is None else f"{kind}({text}, {self.dtype})"


def draw_counts(
    rng: np.random.Generator, name: str, near: range, rows: int, x64: bool, far: float = 0.25
) -> Integers:
    """Return one integer, or one a row, near a range or far from it."""
    form = str(rng.choice(["int", "scalar", "numpy", "jax"], p=[0.4, 0.1, 0.2, 0.3]))
    shape = () if form in ("int", "scalar") else [(), (1,), (rows,)][rng.integers(3)]
    dtype = _draw_dtype(rng, form, x64)
    pool = FAR if rng.random() < far else tuple(near)
    return Integers(name, _draw_values(rng, pool, shape, form, dtype), form, dtype)


def draw_lengths(
    rng: np.random.Generator, name: str, near: range, rows: int, x64: bool, far: float = 0.25
) -> Integers:
    """Return one number of tokens, or one a row: below 0 only where it is not read."""
    drawn = draw_counts(rng, name, near, rows, x64, far)
    if drawn.form == "jax":
        return drawn
    return replace(drawn, values=np.asarray(np.maximum(drawn.values, 0), object))


def draw_ids(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], pool: tuple[int, ...], x64: bool
) -> Integers:
    """Return an array of ids out of a few, in runs or in any order."""
    form = str(rng.choice(["numpy", "jax"]))
    dtype = _draw_dtype(rng, form, x64)
    values = _draw_values(rng, pool, shape, form, dtype)
    if rng.random() < 0.5:
        values = np.sort(values, axis=-1)
    return Integers(name, values, form, dtype)


def _draw_dtype(rng: np.random.Generator, form: str, x64: bool) -> str:
    return str(rng.choice(NARROW if form == "jax" and not x64 else DTYPES))


def _draw_values(
    rng: np.random.Generator, pool: tuple[int, ...], shape: tuple[int, ...], form: str, dtype: str
) -> np.ndarray:
    limits = np.iinfo(dtype)
    held = [value for value in pool if form == "int" or limits.min <= value <= limits.max]
    values = np.empty(shape, object)
    for index in np.ndindex(shape):
        values[index] = held[rng.integers(len(held))] if held else 0
    return values
