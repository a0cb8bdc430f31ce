"""How far two arrays are apart: in few elements, by a factor, or by the rounding of float32."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.trace.gaps import Gap
from flax_attn.parity.trace.layouts import laid_out
from flax_attn.parity.trace.notation import plain
from flax_attn.parity.trace.numbers import LAYOUTS, same_array

# The numbers of an array whose elements are compared one by one.
DISTINCT = 4
# The relative error of a number that is written with few digits.
SHORT = 1e-10
# The layouts that are tried of each of several values that differ.
TRIED = 3


def few_apart(gap: Gap) -> str:
    """Return at how many places two arrays of a few numbers differ, such as masks."""
    values = _values(gap)
    if values is None:
        return ""
    ours, theirs = values
    there = next(laid_out(theirs, ours.shape), None)
    if there is None or ours.size < DISTINCT**2:
        return ""
    floating = any(array.dtype.kind in "fc" for array in values)
    if floating and any(len(np.unique(array)) > DISTINCT for array in values):
        return ""
    apart = np.argwhere(ours != there)
    if not len(apart):
        return ""
    first = tuple(apart[0].tolist())
    flax, torch = plain(ours[first].item()), plain(there[first].item())
    return (
        f"{len(apart)} of {ours.size} elements differ, the first at {plain(first)}: flax {flax},"
        f" torch {torch}"
    )


def times_apart(gap: Gap) -> str:
    """Return by which number one of two arrays is the other, if they differ in nothing else."""
    values = _values(gap)
    if gap.parameter not in ("operation", "operand") or values is None:
        return ""
    ours, theirs = values
    if not ours.size or ours.dtype.kind != "f" or theirs.dtype.kind != "f":
        return ""
    largest = np.abs(ours).argmax()
    for there in layouts_of(gap):
        with np.errstate(all="ignore"):
            ratio = float(there.flat[largest] / ours.flat[largest])
            multiplied = ours * ratio
        # Any two numbers have a ratio: of those a short one alone says something.
        is_short = abs(float(plain(ratio)) - ratio) <= SHORT * abs(ratio)
        says_something = ratio != 1 and (ours.size > 1 or is_short)
        if says_something and same_array(multiplied, there):
            return f"what torch has is {plain(ratio)} times what flax has"
    return ""


def rounded_apart(gap: Gap) -> float:
    """Return by how much two arrays differ that agree to float32, which one of them is in; else 0.

    Tables are built in float32 on both sides as a rule, each with roundings of its own.
    """
    values = _values(gap)
    operations = [part.operation for part in (gap.flax, gap.torch) if part is not None]
    if gap.parameter != "operation" or values is None or "cast" in operations:
        return 0.0
    ours, theirs = values
    if not (_is_single(ours) or _is_single(theirs)):
        return 0.0
    for there in islice(laid_out(theirs, ours.shape), LAYOUTS):
        error = rounded_by(ours, there)
        if error:
            return error
    return 0.0


def _is_single(array: np.ndarray) -> bool:
    # What hides in float64 is infinite in float32.
    with np.errstate(over="ignore"):
        return array.dtype.kind == "f" and bool((array == array.astype(np.float32)).all())


def rounded_by(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return by how much two arrays differ, if they agree to float32; else 0."""
    finite = np.isfinite(ours) & np.isfinite(theirs)
    hidden = ~finite
    # What is hidden is -inf, which no rounding makes or takes away.
    if not np.array_equal(ours[hidden], theirs[hidden], equal_nan=True):
        return 0.0
    apart = np.abs(ours[finite] - theirs[finite])
    sizes = np.abs(theirs[finite])
    error, scale = apart.max(initial=0.0), sizes.max(initial=0.0)
    if error == 0 or error > tolerance.REORDERED_FLOAT32 * scale:
        return 0.0
    return float(error / scale)


def layouts_of(gap: Gap) -> Iterator[np.ndarray]:
    """Yield the value that PyTorch has at a gap in layouts of that of JAX, if both have one."""
    values = _values(gap)
    if values is not None:
        ours, theirs = values
        yield from islice(laid_out(theirs, ours.shape), TRIED)


def _values(gap: Gap) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the arrays of JAX and of PyTorch at a gap, if both have one."""
    ours = gap.flax and gap.flax.origin
    theirs = gap.torch and gap.torch.origin
    return None if ours is None or theirs is None else (ours.value, theirs.value)
