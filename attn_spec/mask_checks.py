"""Checks of the parts of a mask, with the same messages in both packages."""

from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any, NoReturn

import numpy as np


def check_window(**sizes: Any) -> None:
    """Raise unless each side of a window is None or a number of keys."""
    for name, size in sizes.items():
        is_integer = isinstance(size, Integral) and not isinstance(size, bool)
        if size is not None and not (is_integer and int(size) >= 0):
            raise ValueError(
                f"a window's {name} is a number of keys, at least 0, known before tracing; got"
                f" {name}={size}. For an unbounded side pass None"
            )


def check_offset_given(offset: Any, t: int, s: int) -> None:
    """Raise where it is open at which key the first query stands."""
    if offset is None and t != s:
        raise ValueError(
            "a causal, window or prefix mask needs an offset when t != s: query i has position"
            f" offset + i; got t={t}, s={s}. Choose offset=0 (top-left, as torch's is_causal)"
            f" or offset={s - t} (bottom-right, as FlashAttention): pass"
            " mask=Mask.causal(offset=...), without is_causal, or to a module that was built with"
            " causal=False"
        )


def check_rows(name: str, values: Any, b: int) -> None:
    """Raise unless values are None, an integer, or an array of one integer or one a row."""
    shape = tuple(getattr(values, "shape", ()))
    if shape not in ((), (1,), (b,)):
        raise ValueError(
            f"{name} must be one integer or one a row, shape ({b},); got shape {shape}"
        )


def check_segment_ids(name: str, shape: tuple[int, ...], b: int, tokens: int) -> None:
    """Raise unless there is one segment id a token."""
    if shape not in ((tokens,), (1, tokens), (b, tokens)):
        raise ValueError(
            f"{name} segments must have one id a token, shape ({b}, {tokens}) or ({tokens},);"
            f" got {shape}. When t != s pass both: Mask.segments(query, key)"
        )


def check_whole(name: str, sizes: Sequence[int], s: int) -> None:
    """Raise unless an array of a mask has the tokens of a whole sequence of `s`."""
    if any(size != s for size in sizes):
        raise ValueError(
            "under a cache the mask is that of the whole sequence, with one row and one column for"
            f" each of the capacity={s} tokens it can hold; got {name} of"
            f" {', '.join(map(str, sizes))} tokens. Pad it to the capacity: what stands beyond the"
            " tokens is hidden"
        )


def check_zeros_and_ones(found: bool | None, dtype: Any, cast: str) -> None:
    """Raise unless a mask of numbers was found to hold 0 and 1 only, and a 1.

    `found` is None where its values are not known, and False for numbers that are not real; `cast`
    is the call that makes it boolean.
    """
    if found:
        return
    # Zeros only could be a mask that hides all, or numbers to add that hide nothing.
    if found is None:
        got = f"dtype {dtype}, whose values are not known while tracing"
    else:
        got = f"other values, dtype {dtype}"
    raise ValueError(
        f"mask must be boolean, True = attend, or of 0 and 1 with at least one 1; got {got}. To add"
        f" numbers to the scores pass them as bias; to attend where it is not 0 write mask.{cast}"
    )


def check_integers(name: str, is_integer: bool, dtype: Any) -> None:
    """Raise unless an array holds integers."""
    if not is_integer:
        raise ValueError(f"{name} must be integers; got dtype {dtype}. Cast them before the call")


def check_counts(**counts: Any) -> None:
    """Raise unless known numbers of tokens are at least 0.

    Known are integers of Python and NumPy, alone, in arrays and in lists. Arrays of a framework are
    not read: that would wait for the device, and a cache has -1 in rows that are invalid.
    """
    for name, given in counts.items():
        least = min(_known(given), default=0)
        if least < 0:
            raise ValueError(
                f"{name.replace('_', ' ')} must be numbers of tokens, at least 0; got {least}."
                " Where there is none pass 0"
            )


def _known(values: Any) -> Iterator[int]:
    if isinstance(values, np.ndarray | np.generic):
        values = values.tolist()
    if isinstance(values, list | tuple):
        for one in values:
            yield from _known(one)
    elif isinstance(values, Integral):
        yield int(values)


def refuse_operator(operator: str) -> None:
    """Raise for an operator that no conjunction has."""
    raise TypeError(
        f"a Mask is a conjunction: parts are combined with &, and there is no {operator}. Write the"
        " condition as a function: Mask.where(lambda b, n, i, j: ...), which may use |, & and ~"
    )


def refuse_truth() -> NoReturn:
    """Raise for `and`, `or`, `not` and `if`, which would keep one of two masks."""
    raise TypeError(
        "a Mask has no truth value: `and` and `or` would drop one of two masks. To attend where"
        " both let through write mask & other; to ask whether there is a mask write mask is None"
    )


def read_array(name: str, values: Any, read: Callable, kinds: Any, framework: str) -> Any:
    """Return `read(values)`, or raise unless they are of these kinds, numbers or lists.

    `framework` is the name of the one whose arrays are taken.
    """
    taken = kinds | np.ndarray | np.generic | bool | int | float | list | tuple
    if not isinstance(values, taken):
        remedy = f"Pass an array of {framework} or NumPy"
        if name == "mask" and callable(values):
            remedy = "For a function of indices, fn(b, n, i, j), pass Mask.where(fn)"
        raise ValueError(
            f"{name} must be an array, a number or a list; got {type(values).__name__}. {remedy}"
        )
    if name == "mask" and isinstance(values, list | tuple):
        others = [type(x).__name__ for x in values if not isinstance(x, taken)]
        if others:
            raise ValueError(
                f"mask must be one Mask, or one array; got a {type(values).__name__} that holds"
                f" {others[0]}. Combine masks with &: mask & other"
            )
    try:
        return read(values)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(
            f"{name} must be one array; got {error}. Pass rows of one length, of numbers"
        ) from error
