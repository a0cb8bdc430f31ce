"""Checks of sizes, numbers, names and arrays that both packages share, with the same messages.

The rule, the values, the remedy. They run at construction where the values are known there, and
otherwise at trace time, before any work is done.
"""

from collections.abc import Collection, Iterable
from numbers import Integral, Real
from typing import Any, NoReturn

# The dtypes that a call may have.
DTYPES = ("float64", "float32", "bfloat16", "float16")


def check_positive(**sizes: int) -> None:
    """Raise unless every size is a positive integer."""
    for name, size in sizes.items():
        # A bool is an Integral, and a size of True is a mistake.
        if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
            raise ValueError(f"{name} must be a positive integer; got {name}={size!r}")


def check_number(**numbers: float) -> None:
    """Raise unless every value is one real number of Python or NumPy."""
    for name, number in numbers.items():
        # An array of one element is refused: its value may not be known.
        if isinstance(number, bool) or not isinstance(number, Real):
            raise ValueError(
                f"{name} must be one real number; got {name}={number!r}. Pass a float of Python"
            )


def check_odd(**sizes: int) -> None:
    """Raise unless every size is a positive odd integer."""
    check_positive(**sizes)
    for name, size in sizes.items():
        if size % 2 == 0:
            raise ValueError(
                f"{name} must be odd, so that a window has a middle; got {name}={size}. Use"
                f" {size + 1}"
            )


def check_context_length(context_length: int | None) -> None:
    """Raise unless it is a positive integer, or None for no limit."""
    if context_length is not None:
        check_positive(context_length=context_length)


def check_type(name: str, value: object, kind: Any, remedy: str) -> None:
    """Raise unless `value` is an instance of `kind`, a class or a union of them."""
    if not isinstance(value, kind):
        # A union has its classes in `__args__`.
        kinds = [one.__name__ for one in getattr(kind, "__args__", (kind,))]
        expected = " or ".join(kinds).replace("NoneType", "None")
        raise ValueError(f"{name} must be {expected}; got {kind_of(value)}. Pass {remedy}")


def kind_of(value: object) -> str:
    """Return what errors call a value: the name of its class, or that it is a class itself.

    Example:
        >>> kind_of(1), kind_of(int)
        ('int', 'the class int, not an instance')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}, not an instance"
    return type(value).__name__


def check_eps(eps: float) -> None:
    """Raise unless `eps` is at least 0."""
    check_number(eps=eps)
    # Written so that NaN is refused, too.
    if not eps >= 0:
        raise ValueError(
            f"eps is added to a variance and must be at least 0; got eps={eps!r}. Usual is 1e-5"
        )


def check_rate(dropout: float) -> None:
    """Raise unless `dropout` is a probability below one."""
    # A rate of 1 would divide what is kept by 0.
    if not isinstance(dropout, Real) or not 0 <= dropout < 1:
        raise ValueError(
            "dropout must be in [0, 1), the probability that a weight is dropped; got"
            f" dropout={dropout!r}. For no dropout pass 0.0"
        )


def check_tokens(
    name: str, x: Any, width_name: str, width: int, context_length: int | None
) -> None:
    """Raise unless an array is `(t, width)` or `(b, t, width)` with `t <= context_length`.

    Its dtype must be one that a call may have.
    """
    shape = shape_of(name, x)
    if len(shape) not in (2, 3):
        raise ValueError(
            f"{name} must have shape (t, {width_name}) or (b, t, {width_name}); got rank"
            f" {len(shape)}, shape {shape}. For more batch axes use jax.vmap or torch.vmap, or"
            " reshape them into one"
        )
    check_width(name, x, width_name, width)
    if context_length is not None and shape[-2] > context_length:
        raise ValueError(
            f"{name} must not be longer than context_length={context_length} tokens; got"
            f" {shape[-2]} tokens, shape {shape}. Cut the input or construct the module with a"
            " larger context_length"
        )


def shape_of(name: str, x: Any) -> tuple[int, ...]:
    """Return the shape of an array, or raise where an argument is none."""
    # A list has neither, and would fail later with the words of a framework.
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise ValueError(
            f"{name} must be an array; got {type(x).__name__}. Make it one before the call"
        )
    return tuple(x.shape)


def check_width(name: str, x: Any, width_name: str, width: int) -> None:
    """Raise unless the last axis of an array is `width` wide, and its dtype one for calls."""
    shape = shape_of(name, x)
    if not shape or shape[-1] != width:
        raise ValueError(
            f"the last axis of {name} must be {width_name}={width}; got shape {shape}. "
            f"Pass an input of that width or construct the module with another {width_name}"
        )
    check_dtype(name, x)


def check_dtype(
    names: str, *arrays: Any, remedy: str = "Cast to one of them before the call"
) -> None:
    """Raise unless all arrays, or names of dtypes, are of one that a call may have."""
    # torch writes its own name before that of a dtype, JAX and NumPy do not.
    found = [str(getattr(x, "dtype", x)).removeprefix("torch.") for x in arrays]
    wrong = [dtype for dtype in found if dtype not in DTYPES]
    if wrong:
        raise ValueError(
            f"{names} must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}; got {wrong[0]}. {remedy}"
        )


def refuse_dtype(name: str, dtype: object, framework: str, package: str, example: str) -> NoReturn:
    """Raise for what is no dtype of a framework."""
    raise ValueError(
        f"{name} must be a {framework} dtype; got {dtype}. Pass {name}={example}, or another of"
        f" {package}"
    )


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise unless `value` is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        known = ", ".join(map(repr, choices))
        near = nearest(str(value), choices)
        raise ValueError(f"{name} must be one of {known}; got {value!r}{near}")


def check_keywords(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise `TypeError`, as Python does, unless a function has every keyword.

    Example:
        >>> check_keywords("f", ["sise"], ["size", "key"])
        Traceback (most recent call last):
        TypeError: f takes the keywords size, key; got sise. The nearest is size
    """
    known = list(known)
    for name in given:
        if name not in known:
            near = _most_like(name, known)
            remedy = f"The nearest is {near}" if near else "Leave it out"
            names = ", ".join(known)
            raise TypeError(f"{function} takes the keywords {names}; got {name}. {remedy}")


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a note on the name that is most like a wrong one; empty if none is like it.

    Example:
        >>> nearest("foward", ["forward", "weights"])
        ' (nearest: forward)'
    """
    near = _most_like(name, names)
    return f" (nearest: {near})" if near else ""


def _most_like(name: str, names: Iterable[str]) -> str:
    # Only errors need it, and so it does not slow down the import.
    import difflib

    found = difflib.get_close_matches(name, list(names), n=1)
    return found[0] if found else ""
