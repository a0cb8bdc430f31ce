"""Checks of user functions for masks and scores, with the same messages in both packages."""

import inspect
from collections.abc import Sequence
from typing import Any

SEES = ("b", "n", "i", "j")
SCORES = ("score", *SEES)
_INDICES = "the indices of batch row, query head, query and key"


def check_function(what: str, function: Any, arguments: Sequence[str]) -> None:
    """Raise unless it is a function that takes these arguments, by position."""
    rule = f"the function of a {what} is fn({', '.join(arguments)}), with b, n, i, j {_INDICES}"
    if not callable(function):
        raise ValueError(f"{rule}; got {type(function).__name__}. Pass a function")
    # Bound, not called: a call would need indices.
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        signature = inspect.signature(function)
        raise ValueError(
            f"{rule}; got one that takes {signature}. Take all {len(arguments)} arguments"
        ) from error
    except ValueError:  # a builtin without a signature, which the call itself will judge
        return


def check_sees(dtype: str, size: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise unless the function of a mask returned booleans that broadcast to `expected`."""
    rule = "the function of a mask returns one boolean for one (b, n, i, j), True = attend"
    if dtype != "bool":
        raise ValueError(
            f"{rule}; got dtype {dtype}. Compare: i - j < 4 instead of i - j; for 0/1 integers"
            " write != 0"
        )
    _check_size(rule, size, expected)


def check_scored(dtype: str, size: tuple[int, ...], given: str, expected: tuple[int, ...]) -> None:
    """Raise unless the function of a score returned numbers that broadcast to `expected`.

    They must have the dtype of the score, `given`.
    """
    rule = (
        "the function of a score returns the new score for one (b, n, i, j), in the dtype of the"
        " score"
    )
    if dtype != given:
        remedy = (
            "Cast what it adds or multiplies to score.dtype"
            if dtype.startswith("float")
            else "Return a score"
        )
        raise ValueError(f"{rule}, here {given}; got dtype {dtype}. {remedy}")
    _check_size(rule, size, expected)


def _check_size(rule: str, size: tuple[int, ...], expected: tuple[int, ...]) -> None:
    # Axes are added in front, as broadcasting does.
    padded = (1,) * (len(expected) - len(size)) + size
    if len(size) > len(expected) or any(
        a not in (1, e) for a, e in zip(padded, expected, strict=True)
    ):
        raise ValueError(
            f"{rule}; got an array for one. Index what it reads down to one number, as in table[n,"
            " j - i]"
        )


def check_single(what: str, result: Any, is_array: bool) -> None:
    """Raise unless the function of a mask or a score returned one array or number."""
    if not is_array:
        raise ValueError(
            f"the function of a {what} returns one array; got {type(result).__name__}. Return the"
            " result alone"
        )


def needs_values(what: str, error: Exception) -> ValueError:
    """Return the error for a function that needs the values of its indices."""
    return ValueError(
        f"the function of a {what} is called once for all indices, which have no values of their"
        " own: write & and | in place of and and or, where in place of if, and index arrays of the"
        f" framework, not of NumPy; got {error}"
    )


def check_known(b: int | None, n: int | None) -> None:
    """Raise unless it is known for how many batch rows and heads a function is asked."""
    if b is None or n is None:
        raise ValueError(
            "a mask of a function that reads b or n has to know how many batch rows and query"
            f" heads there are; got b={b}, n={n}. Say it first: mask.sized(b, n)"
        )


def check_same_size(name: str, known: int | None, size: int) -> None:
    """Raise unless a mask for a known number of rows or heads is used for as many."""
    if known not in (None, size):
        raise ValueError(
            f"this mask of a function is one for {name}={known}; got {name}={size}. Make it again"
            " for that many"
        )


def check_token_positions(
    name: str, size: tuple[int, ...], integers: bool, b: int, tokens: int
) -> None:
    """Raise unless there is one integer a token, for all rows of the batch or for each."""
    if not integers or size not in ((tokens,), (1, tokens), (b, tokens)):
        raise ValueError(
            f"{name}_positions of a score are one integer a token, of shape ({b}, {tokens}) or"
            f" ({tokens},); got shape {size}{'' if integers else ', not integers'}. Those of a"
            " KVCache are cache.positions(t) and extended.key_positions"
        )
