"""Inputs and constants as they are written on the command line."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flax_attn.cli.guard import UsageError

HELP = (
    "an input: 2,3,12,12 or x:float:2,3,12,12 is drawn from the normal distribution,"
    " x:float:2,5:0..1 evenly; ids:int:2,7:0..99 holds integers, both ends included;"
    " mask:bool:2,5 holds both values. Repeated for each input. With names the calls take them by"
    " name, without by position"
)
_INTEGERS = ("int", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
_KINDS = ("float", "bool", *_INTEGERS)


@dataclass(frozen=True)
class InputSpec:
    """One input.

    Args:
        name: name by which the calls take it; empty by position.
        kind: `"float"`, `"bool"`, or a dtype of integers.
        sizes: shape.
        ends: smallest and largest value; None are normal floats, or booleans.
    """

    name: str
    kind: str
    sizes: tuple[int, ...]
    ends: tuple[float, float] | None

    def resized(self, sizes: Mapping[int, int]) -> InputSpec:
        """Return the input with other sizes in place of some."""
        return replace(self, sizes=tuple(sizes.get(size, size) for size in self.sizes))

    def draw(self, random: np.random.Generator) -> np.ndarray:
        """Return random values: integers with both ends among them, masks with both values."""
        if self.kind == "bool":
            return _mask(random, self.sizes)
        if self.ends is None:
            return random.normal(size=self.sizes)
        low, high = self.ends
        if self.kind == "float":
            return random.uniform(low, high, self.sizes)
        dtype = "int64" if self.kind == "int" else self.kind
        drawn = random.integers(int(low), int(high), self.sizes, dtype, endpoint=True)
        # What is only wrong at one end of a table would else be seen by chance.
        if drawn.size > 1:
            places = random.choice(drawn.size, 2, replace=False)
            drawn.flat[places] = int(low), int(high)
        return drawn


def _mask(random: np.random.Generator, sizes: tuple[int, ...]) -> np.ndarray:
    drawn = random.integers(0, 2, sizes).astype(bool)
    # Each row keeps something, since softmax over nothing is NaN in PyTorch; one hides something.
    drawn[..., 0] = True
    drawn[..., -1].flat[-1:] = drawn.shape[-1] == 1
    return drawn


def parse(text: str) -> InputSpec:
    """Return the input that a text describes.

    Raises:
        UsageError: if it describes none.

    Example:
        >>> parse("ids:int:2,7:0..99")
        InputSpec(name='ids', kind='int', sizes=(2, 7), ends=(0.0, 99.0))
    """
    # From the right: the shape is always there, and stands behind the names.
    parts = text.split(":")
    ends = _ends(parts.pop()) if ".." in parts[-1] else None
    sizes = _sizes(parts.pop()) if parts else None
    kind = parts.pop() if parts else "float"
    name = parts.pop() if parts else ""
    if parts or sizes is None or kind not in _KINDS or (name and not name.isidentifier()):
        raise UsageError(
            "an input is SHAPE, KIND:SHAPE or NAME:KIND:SHAPE, such as 3,5,6 or ids:int:2,7:0..99,"
            f" of the kinds {', '.join(_KINDS)}; got {text!r}"
        )
    _check_ends(text, kind, ends)
    return InputSpec(name, kind, sizes, ends)


def _check_ends(text: str, kind: str, ends: tuple[float, float] | None) -> None:
    if kind in _INTEGERS and ends is None:
        raise UsageError(f"integers have a smallest and a largest value: {text}:0..99, both held")
    if kind == "bool" and ends is not None:
        raise UsageError(f"a mask holds both values, and has no range; got {text!r}")
    if ends is None:
        return
    low, high = ends
    whole = low == int(low) and high == int(high)
    info = np.iinfo(kind) if kind in _INTEGERS else None
    if low > high or (info and not (whole and info.min <= low and high <= info.max)):
        raise UsageError(f"a range is LOW..HIGH of values that {kind} holds; got {text!r}")


def _sizes(text: str) -> tuple[int, ...] | None:
    numbers = text.split(",")
    if not all(number.isascii() and number.isdigit() and int(number) for number in numbers):
        return None
    return tuple(int(number) for number in numbers)


def _ends(text: str) -> tuple[float, float]:
    low, _, high = text.partition("..")
    try:
        ends = float(low), float(high)
        if not all(map(math.isfinite, ends)):
            raise ValueError(text)
    except ValueError:
        raise UsageError(f"a range is LOW..HIGH, such as 0..99; got {text!r}") from None
    return ends


def draw(specs: Sequence[InputSpec], seed: int) -> Any:
    """Return the inputs: by name in a mapping, or by position in a list.

    Raises:
        UsageError: if some have a name and others none, or two have one.
    """
    names = [spec.name for spec in specs]
    if any(names) and (not all(names) or len(set(names)) < len(names)):
        raise UsageError(f"inputs have a name each, or none has; got {', '.join(map(repr, names))}")
    random = np.random.default_rng(seed)
    arrays = [spec.draw(random) for spec in specs]
    return dict(zip(names, arrays, strict=True)) if any(names) else arrays


def constants(texts: Sequence[str]) -> dict[str, Any]:
    """Return arguments of both calls that are no arrays.

    Raises:
        UsageError: if one is no `NAME=VALUE` with a value as Python writes it.

    Example:
        >>> constants(["eps=0.1", "causal=True", "mode='same'"])
        {'eps': 0.1, 'causal': True, 'mode': 'same'}
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            if not (equals and name.isidentifier()):
                raise ValueError(text)
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise UsageError(
                "a constant is NAME=VALUE, the value as Python writes it, such as eps=0.1 or"
                f" mode=\"'same'\"; got {text!r}"
            ) from None
    return found
