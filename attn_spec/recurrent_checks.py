"""Checks of recurrent layers that both packages share, with the same messages."""

from collections.abc import Mapping
from typing import Any

Shape = tuple[int, ...]


def check_delta_rule(
    query: Shape,
    key: Shape,
    value: Shape,
    decay: Shape,
    beta: Shape | None,
    state: Shape | None,
    starts: Shape | None,
) -> None:
    """Raise unless these are the shapes of one call of the gated delta rule."""
    if len(query) not in (3, 4) or len(value) != len(query) or query != key:
        raise ValueError(
            "query and key must have shape (b, t, k, h) both and value (b, t, n, v), or all three"
            f" without b; got query {query}, key {key}, value {value}"
        )
    if 0 in query[-3:] or 0 in value[-3:] or query[:-2] != value[:-2] or value[-2] % query[-2]:
        raise ValueError(
            "query and value must have the same rows b and tokens t, at least one of these, and"
            f" the heads k of the query must divide the heads n of the value; got query {query},"
            f" value {value}"
        )
    heads, (n, v), h = value[:-1], value[-2:], query[-1]
    # A decay of each feature is that of Kimi's attention, one of a head that of the Gated DeltaNet.
    if decay not in (heads, (*heads, h)):
        raise ValueError(
            f"decay must be one number a head, {heads}, or one a feature of its key, {(*heads, h)};"
            f" got {decay}"
        )
    wanted = {"beta": heads, "state": (*query[:-3], n, v, h), "starts": query[:-2]}
    for (name, shape), got in zip(wanted.items(), (beta, state, starts), strict=True):
        if got not in (None, shape):
            raise ValueError(
                f"{name} must have shape {shape} beside query {query} and value {value}; got {got}"
            )


def check_short_convolution(
    x: Shape, kernel: Shape, state: Shape | None, starts: Shape | None
) -> None:
    """Raise unless these are the shapes of one call of a short convolution."""
    if len(x) not in (2, 3) or 0 in x[-2:]:
        raise ValueError(f"x must have shape (t, d) or (b, t, d), with at least one token; got {x}")
    if len(kernel) != 2 or kernel[1] != x[-1] or not kernel[0]:
        raise ValueError(
            f"kernel must have shape (w, d), w numbers for each of the d={x[-1]} features of x; got"
            f" {kernel}"
        )
    wanted = {"state": (*x[:-2], kernel[0] - 1, x[-1]), "starts": x[:-1]}
    for (name, shape), got in zip(wanted.items(), (state, starts), strict=True):
        if got not in (None, shape):
            raise ValueError(
                f"{name} must have shape {shape} beside x {x} and kernel {kernel}; got {got}"
            )


def check_recurrent_heads(num_heads: int, num_key_heads: int) -> None:
    """Raise unless every key head serves equally many value heads."""
    if num_heads % num_key_heads:
        raise ValueError(
            "num_key_heads must divide num_heads, so that every key head serves equally many value"
            f" heads; got num_heads={num_heads}, num_key_heads={num_key_heads}"
        )


def check_recurrent_options(options: Mapping[str, Any]) -> None:
    """Raise if a call asks a recurrent attention for what it has not."""
    known = ("bias", "positions", "return_weights", "dropout_key")
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"a recurrent attention takes no {name}=; got {type(value).__name__}")
        # Other layers take these at their defaults, so that a block calls all alike.
        if value is not None and value is not False and name != "dropout_key":
            raise ValueError(
                "a recurrent attention has a state, and no scores, weights or positions; got"
                f" {name}=. Leave it out, or use MultiHeadAttention"
            )
