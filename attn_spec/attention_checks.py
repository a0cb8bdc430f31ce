"""Checks of one attention call and its mask, with the same messages in both packages."""

import math
from numbers import Real
from typing import Any

# Numbers by which float32 can divide scores and keep their digits.
_LEAST_CAP, _LARGEST_CAP = 1e-30, 1e30


def is_finite(value: Any) -> bool:
    """Return whether a value is one real number that is finite as a float.

    Example:
        >>> is_finite(2), is_finite(True), is_finite("2"), is_finite(10**400)
        (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_scale(scale: Any, shape: tuple[int, ...] | None, dtype: str) -> None:
    """Raise unless the scale is one finite number.

    Only the shape and dtype of an array are checked, as its value is not known.
    """
    rule = "scale is one real number for all scores, finite where it is known before tracing"
    if shape is None and not is_finite(scale):
        raise ValueError(f"{rule}; got scale={scale!r}. For 1 / sqrt(h) pass None")
    if shape is not None and (
        shape != () or not dtype.startswith(("float", "bfloat", "int", "uint"))
    ):
        raise ValueError(
            f"{rule}; got an array of shape {shape}, dtype {dtype}. Pass one of shape (), and"
            " multiply what differs between heads or tokens into query or key"
        )


def check_soft_cap(soft_cap: Any) -> None:
    """Raise unless the cap is None or a positive number that float32 can divide by."""
    if soft_cap is None or (is_finite(soft_cap) and _LEAST_CAP <= soft_cap <= _LARGEST_CAP):
        return
    raise ValueError(
        f"soft_cap must be positive, a number from {_LEAST_CAP} to {_LARGEST_CAP} known before"
        f" tracing; got soft_cap={soft_cap!r}. For no cap pass None"
    )


def check_sinks(num_heads: int, shape: tuple[int, ...], dtype: str) -> None:
    """Raise unless there is one logit per query head."""
    if shape != (num_heads,):
        raise ValueError(
            f"sinks must be one logit a query head, shape ({num_heads},); got shape {shape}"
        )
    if not dtype.startswith(("float", "bfloat")):
        raise ValueError(f"sinks are logits and must be floating point; got {dtype}. Cast them")


def check_argument(name: str, value: Any, kind: Any, remedy: str) -> None:
    """Raise unless an argument of attention is an array; for a `Mask` say where it goes."""
    if not isinstance(value, kind):
        classes = getattr(kind, "__args__", (kind,))
        # JAX gives its Array a dotted name.
        kinds = [one.__name__.rpartition(".")[2] for one in classes]
        remedy = "Pass a mask as mask=" if type(value).__name__ == "Mask" else remedy
        raise ValueError(
            f"{name} must be {' or '.join(kinds)}; got {type(value).__name__}. {remedy}"
        )


def check_offset(offset: int, t: int, s: int, left: int, right: int) -> None:
    """Raise if the offset of a mask is so far out that all queries see the same keys.

    A query sees `left` keys before its position and `right` keys after it.
    """
    ends = {"-t - right" if right else "-t": -t - right, "s + left" if left else "s": s + left}
    if not -t - right <= offset <= s + left:
        least, most = (f"{name} = {end}" for name, end in ends.items())
        raise ValueError(
            f"a mask offset must lie between {least} and {most}, beyond which all queries see the"
            f" same keys; got offset={offset}, t={t}, s={s}. Query i stands at offset + i: with"
            f" offset={s - t} the last query stands at the last key"
        )


def check_position(offset: int) -> None:
    """Raise unless the offset of a mask that is a function of positions fits 32 bits."""
    if not -(2**31) <= offset < 2**31:
        raise ValueError(
            "the positions that the function of a mask gets are integers of 32 bits; got"
            f" offset={offset}. Count from a later token"
        )
