"""Checks of one attention call and its mask, with the same messages in both packages."""

import math
from numbers import Real
from typing import Any

from attn_spec.checks import check_dtype, check_positive

# Numbers by which float32 can divide scores and keep their digits.
_LEAST_CAP, _LARGEST_CAP = 1e-30, 1e30


def is_finite(value: Any) -> bool:
    """Return whether a value is one real number that is finite as a float.

    Example:
        >>> is_finite(2), is_finite(True), is_finite("2"), is_finite(10**400)
        (True, False, False, False)
    """
    # A bool is a Real.
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    # An integer may be too large for a float.
    except OverflowError:
        return False


def check_scale(scale: Any, shape: tuple[int, ...] | None, dtype: str) -> None:
    """Raise unless the scale is one finite number.

    Only the shape and dtype of an array are checked, as its value is not known.
    """
    rule = "scale is one real number for all scores, finite where it is known before tracing"
    # Without a shape it is a number of Python, whose value is known.
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


def check_holds_numbers(name: str, holds_numbers: bool, dtype: Any) -> None:
    """Raise unless the dtype of an array is one of numbers or booleans."""
    if not holds_numbers:
        raise ValueError(
            f"{name} must be an array of numbers; got dtype {dtype}. Pass"
            f" {name}.astype(np.float32), or what it holds as one array"
        )


def check_offset(offset: int, t: int, s: int, left: int, right: int) -> None:
    """Raise if the offset of a mask is so far out that all queries see the same keys.

    A query sees `left` keys before its position and `right` keys after it.
    """
    # The names stand in the message: the bounds as the reader knows them.
    ends = {"-t - right" if right else "-t": -t - right, "s + left" if left else "s": s + left}
    if not -t - right <= offset <= s + left:
        least, most = (f"{name} = {end}" for name, end in ends.items())
        raise ValueError(
            f"a mask offset must lie between {least} and {most}, beyond which all queries see the"
            f" same keys; got offset={offset}, t={t}, s={s}. Query i has position offset + i: with"
            f" offset={s - t} the last query is at the last key"
        )


def check_position(offset: int) -> None:
    """Raise unless the offset of a mask that is a function of positions fits 32 bits."""
    if not -(2**31) <= offset < 2**31:
        raise ValueError(
            "the positions that the function of a mask gets are integers of 32 bits; got"
            f" offset={offset}. Count from a later token"
        )


def check_key_data(shape: tuple[int, ...], dtype: str) -> None:
    """Raise unless it is the data of one dropout key."""
    if len(shape) != 1 or shape[0] < 2 or not dtype.startswith(("int", "uint")):
        raise ValueError(
            f"a dropout key must be one key, of at least two integers; got shape {shape}, dtype"
            f" {dtype}. Of a batch of keys pass one"
        )


def check_inputs(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], dtypes: tuple[str, ...]
) -> None:
    """Raise unless the three shapes and dtypes belong to one attention call."""
    shapes = f"got query {query}, key {key}, value {value}"
    if len(query) not in (3, 4) or not len(query) == len(key) == len(value):
        raise ValueError(
            "query, key and value must have shape (b, t, n, h), (b, s, k, h), (b, s, k, v), or all"
            f" three without b; {shapes}"
        )
    # No queries are fine, no keys are not: a softmax over nothing has no value.
    if 0 in key[-3:] or 0 in query[-2:] or value[-1] == 0:
        raise ValueError(
            "there must be at least one key token, one head and a head width of at least 1;"
            f" {shapes}"
        )
    if len(query) == 4 and not query[0] == key[0] == value[0]:
        raise ValueError(
            f"query, key and value must have one batch size; {shapes}. Repeat the smaller batch"
            " first"
        )
    if key[-3] != value[-3] or key[-2] != value[-2]:
        raise ValueError(
            f"key and value must have the same number of tokens s and of heads k; {shapes}"
        )
    if query[-1] != key[-1]:
        raise ValueError(f"query and key must have one head width h; {shapes}")
    # Checked after the head width, so that the message names the first thing that is wrong.
    if query[-2] % key[-2]:
        raise ValueError(
            "the key/value heads must divide the query heads: query head i reads key/value head i"
            f" // (n / k); {shapes}"
        )
    if len(set(dtypes)) > 1:
        raise ValueError(
            f"query, key and value must have one dtype; got {', '.join(dtypes)}. Cast them before"
            " the call"
        )
    check_dtype("query, key and value", *dtypes)


def check_bias(shape: tuple[int, ...], dtype: str, to: tuple[int, ...]) -> None:
    """Raise unless the bias is made of numbers to add, and broadcasts to `to`."""
    # Adding 0 and 1 is never what is meant.
    if dtype == "bool":
        raise ValueError(
            "bias is added to the scores; got dtype bool. Pass a boolean mask as mask="
        )
    check_dtype("bias", dtype)
    check_broadcast("bias", shape, to)


def check_broadcast(name: str, shape: tuple[int, ...], to: tuple[int, ...]) -> None:
    """Raise unless `shape` broadcasts to `to`, the sizes of (b, n, t, s)."""
    # Axes are added in front, as broadcasting does.
    padded = (1,) * (len(to) - len(shape)) + shape
    if len(shape) > len(to) or any(
        size not in (1, full) for size, full in zip(padded, to, strict=True)
    ):
        raise ValueError(
            f"{name} must broadcast to (b, n, t, s) = {to}; got shape {shape}. Over (t, s) it is"
            " used as it is; from (b, s) write [:, None, None, :], from (b, t, s) write [:, None]"
        )


def check_causal_window(window: int | None, causal: bool) -> None:
    """Raise unless a module with a window is causal."""
    if window is None:
        return
    check_positive(window=window)
    if not causal:
        raise ValueError(
            f"window is how many keys a token of a causal module attends to; got window={window},"
            " causal=False. For one in both directions pass mask=Mask.window(left, right)"
        )
