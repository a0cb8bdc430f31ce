"""Checks of the positions of tokens, with the same messages in both packages."""

from numbers import Integral

from attn_spec.checks import check_number

Shape = tuple[int, ...]


def check_positions(shape: Shape, dtype: str, is_integer: bool, tokens: Shape | None) -> None:
    """Raise unless positions are integers, one for each token.

    `tokens` is the shape of the tokens, `(t,)` or `(b, t)`; None where it is not known.
    """
    rule = "positions must be integers of shape (t,) or (b, t)"
    got = f"got shape {shape}, dtype {dtype}"
    if not is_integer or len(shape) not in (1, 2):
        raise ValueError(f"{rule}; {got}. Cast and reshape them before the call")
    if tokens is not None and shape not in (tokens, tokens[-1:]):
        raise ValueError(
            f"{rule}, one for each of the tokens {tokens}; {got}. Without b they serve every row"
        )


def check_segments(shape: Shape, dtype: str, is_integer: bool) -> None:
    """Raise unless the ids of segments are integers `(t,)` or `(b, t)`."""
    if not is_integer or len(shape) not in (1, 2):
        raise ValueError(
            f"segments must be integers of shape (t,) or (b, t), one id a token; got shape {shape},"
            f" dtype {dtype}. Cast and reshape them before the call"
        )


def check_same_rows(query: Shape, key: Shape) -> None:
    """Raise unless positions of queries and of keys have the same rows of a batch, or none."""
    if query[:-1] != key[:-1]:
        raise ValueError(
            "query and key positions must both have the same b, or both none; got shapes"
            f" {query} and {key}. Repeat the positions that all rows share"
        )


def check_pairs(name: str, width: int) -> None:
    """Raise unless `width` features make pairs."""
    # True is an Integral too.
    is_integer = isinstance(width, Integral) and not isinstance(width, bool)
    if not is_integer or width < 2 or width % 2:
        raise ValueError(
            f"{name} must be a positive even integer, as a frequency takes two features; got"
            f" {name}={width!r}"
        )


def check_base(base: float) -> None:
    """Raise unless the frequencies of `base` fall."""
    check_number(base=base)
    # Written so that NaN is refused too.
    if not base > 1:
        raise ValueError(
            f"base must be larger than 1, so that frequencies fall; got base={base}. Usual is 10000"
        )
