"""Formulas on projections, in plain NumPy: their heads, turned or not, and scores of two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations, product

import numpy as np
from einops import rearrange

from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.trace.attention_forms import (
    context,
    join_heads,
    scale_in_words,
    scaled_forms,
    scores,
    share_heads,
    split_heads,
)
from flax_attn.parity.trace.rotary import rotations_of_heads, rotations_of_scores

Forms = Iterator[tuple[str, np.ndarray]]
PROJECTIONS = 8  # of a layer that are tried, the last
STEPS = ("query", "key", "value", "scores", "masked", "weights", "context")
RIGHT_SPLIT = "heads side by side"
SPLITS = {  # of one projection that holds queries, keys and values: the usual one first
    "(3, heads, width)": "b t (c n h) -> c b t n h",
    "(heads, 3, width)": "b t (n c h) -> c b t n h",
    "(heads, width, 3)": "b t (n h c) -> c b t n h",
    "(3, width, heads)": "b t (c h n) -> c b t n h",
}
PAIRS = {  # of one projection that holds keys and values
    "(2, heads, width)": "b s (c k h) -> c b s k h",
    "(heads, 2, width)": "b s (k c h) -> c b s k h",
}


def head_forms(value: np.ndarray, other: np.ndarray, sources: Arrays) -> Forms:
    """Queries, keys or values: the heads of a projection, turned or not."""
    if value.ndim != 4:
        return
    b, t, n, h = value.shape
    projections = {
        name: x.reshape(b, t, n * h) for name, x in sources.items() if x.shape[-2:] == (t, n * h)
    }
    split = {name: split_heads(x, n) for name, x in projections.items()}
    for name, ways in split.items():
        yield from ((f"{name}, {way}", x) for way, x in ways.items())
    for name, ways in split.items():
        yield from _turned(name, value, next(iter(ways.values())))
    for name, x in sources.items():
        if x.shape == value.shape and name not in STEPS:  # of a norm of heads
            yield name, x
            yield from _turned(name, value, x)


def attended_forms(value: np.ndarray, sources: Arrays) -> Forms:
    """Yield weights times a projection, its heads joined again.

    Yields each way to split and to join the heads, the right one first.
    """
    weights = sources.get("weights")
    if (
        weights is None
        or weights.ndim != 4
        or value.ndim != 3
        or value.shape[-1] % weights.shape[1]
    ):
        return
    b, n, t, s = weights.shape
    h = value.shape[-1] // n
    for text, heads in _values(sources, (b, s, h), n) if value.shape[:2] == (b, t) else ():
        for joined, form in join_heads(context(weights, heads)).items():
            yield f"weights . {text}, {joined}", form


def _values(sources: Arrays, shape: tuple[int, int, int], n: int) -> Forms:
    """Yield candidate values `(b, s, n, h)`: projections, then halves of joint keys and values."""
    b, s, h = shape
    usable = {
        name: x
        for name, x in sources.items()
        if x.shape[:2] == (b, s) and x.size % (b * s * h) == 0
    }
    for name, x in list(usable.items())[-PROJECTIONS:]:
        yield from (
            (f"{name}{how}", heads) for how, heads in _shared_heads(x.reshape(b, s, -1), h, n)
        )
    for name, x in list(sources.items())[-PROJECTIONS:]:
        for text, half in _halves(name, x, h, "value") if x.shape[:2] == (b, s) else ():
            yield from ((f"{text}{how}", heads) for how, heads in _shared(half, n))


def _shared_heads(x: np.ndarray, h: int, n: int) -> Forms:
    """Yield a projection as n heads of width h; the right way first, without words."""
    for split, heads in split_heads(x, x.shape[-1] // h).items():
        for how, shared in _shared(heads, n):
            yield ("" if split == RIGHT_SPLIT else f" split as {split}") + how, shared


def _shared(heads: np.ndarray, n: int) -> Forms:
    k = heads.shape[2]
    if n % k == 0:
        yield "", share_heads(heads, n)
    if 1 < k < n and n % k == 0:
        yield " with its heads tiled, not repeated", share_heads(heads, n, tile=True)


def turned_forms(value: np.ndarray, sources: Arrays) -> Forms:
    """Yield rotary outputs for inputs `(b, t, h)`, `(b, t, n, h)` or `(b, n, t, h)`."""
    for name, x in sources.items():
        if x.shape != value.shape or x.ndim not in (3, 4):
            continue
        for heads, back in _HEADS[x.ndim]:
            yield from ((text, back(form)) for text, form in _turned(name, heads(value), heads(x)))


_HEADS = {
    3: [(lambda x: x[:, :, None], lambda x: x[:, :, 0])],
    4: [(lambda x: x, lambda x: x), (lambda x: x.swapaxes(1, 2), lambda x: x.swapaxes(1, 2))],
}


def _turned(name: str, value: np.ndarray, x: np.ndarray) -> Forms:
    yield from (
        (f"RoPE of {name}, {rotation}", rotation.heads(x))
        for rotation in rotations_of_heads(value, x)
    )


@dataclass(frozen=True)
class _Projected:
    """Heads of queries and keys that scores may be of.

    Args:
        text: text for the product of both, with a place for the scale.
        query: `(b, t, n, h)`.
        key: `(b, s, k, h)`.
    """

    text: str
    query: np.ndarray
    key: np.ndarray


def projected_scores(value: np.ndarray, other: np.ndarray, sources: Arrays) -> Forms:
    """Yield scores, or only the visible ones, of two projections or one joint projection."""
    if value.ndim != 4:
        return
    candidates = [
        *_of_two(value.shape, sources),
        *_of_one(value.shape, sources),
        *_of_pairs(value.shape, sources),
    ]
    for found in (*candidates, *_split_otherwise(value.shape, sources)):
        for scale, scaled in scaled_forms(
            scores(found.query, found.key, scale=1.0), value, found.query
        ):
            yield found.text.format(scale), scaled
    for found in candidates:
        yield from _turned_scores(found, value)


def _of_two(shape: tuple[int, ...], sources: Arrays) -> Iterator[_Projected]:
    b, n, t, s = shape
    usable = {
        name: x
        for name, x in sources.items()
        if name not in STEPS and x.ndim in (3, 4) and len(x) == b
    }
    for (name, x), (other, y) in permutations(list(usable.items())[-PROJECTIONS:], 2):
        if (
            x.shape[1] == t
            and y.shape[1] == s
            and x.size % (b * t * n) == 0
            and (x.ndim == 3 or x.shape[2] == n)
        ):
            h = x.size // (b * t * n)
            k, rest = divmod(y.size, b * s * h)
            if not rest and k and n % k == 0 and (y.ndim == 3 or y.shape[2] == k):
                yield _Projected(
                    f"{name} . {other} {{}}", x.reshape(b, t, n, h), y.reshape(b, s, k, h)
                )


def _flat_pairs(
    shape: tuple[int, ...], sources: Arrays
) -> Iterator[tuple[tuple[str, np.ndarray], ...]]:
    """Yield two projections with heads side by side, queries first, with their names."""
    b, n, t, s = shape
    usable = {
        name: x for name, x in sources.items() if name not in STEPS and x.ndim == 3 and len(x) == b
    }
    for (name, x), (other, y) in permutations(list(usable.items())[-PROJECTIONS:], 2):
        if x.shape[1] == t and y.shape[1] == s and x.shape[-1] % n == 0:
            yield (name, x), (other, y)


def _split_otherwise(shape: tuple[int, ...], sources: Arrays) -> Iterator[_Projected]:
    n = shape[1]
    for (name, x), (other, y) in _flat_pairs(shape, sources):
        if y.shape[-1] == x.shape[-1]:
            for (how, query), key in zip(
                split_heads(x, n).items(), split_heads(y, n).values(), strict=True
            ):
                yield _Projected(f"{name} . {other} {{}}, both with {how}", query, key)


def _of_one(shape: tuple[int, ...], sources: Arrays) -> Iterator[_Projected]:
    b, n, t, s = shape
    for name, x in sources.items():
        if s == t and x.shape[:-1] == (b, t) and x.shape[-1] % (3 * n) == 0:
            for split, pattern in SPLITS.items():
                parts = rearrange(x, pattern, c=3, n=n)
                for order in permutations(("query", "key", "value")):
                    query, key = (parts[order.index(part)] for part in ("query", "key"))
                    where = (
                        "" if order[:2] == ("query", "key") else f" in the order {', '.join(order)}"
                    )
                    yield _Projected(
                        f"query . key {{}} of {name} split as {split}{where}", query, key
                    )


def _of_pairs(shape: tuple[int, ...], sources: Arrays) -> Iterator[_Projected]:
    n = shape[1]
    for (name, x), (other, y) in _flat_pairs(shape, sources):
        query = x.reshape(*x.shape[:2], n, -1)
        for text, key in _halves(other, y, query.shape[-1], "key"):
            if n % key.shape[2] == 0:
                yield _Projected(f"{name} . {text} {{}}", query, key)
            if 1 < key.shape[2] < n and n % key.shape[2] == 0:
                tiled = share_heads(key, n, tile=True)
                yield _Projected(
                    f"{name} . {text}, its heads tiled, not repeated, {{}}", query, tiled
                )


def _halves(name: str, x: np.ndarray, h: int, part: str) -> Forms:
    """Yield keys or values, in heads of width h, of a joint projection; the usual split first."""
    if x.ndim == 3 and x.shape[-1] % (2 * h) == 0:
        for (split, pattern), order in product(PAIRS.items(), (("key", "value"), ("value", "key"))):
            where = "" if order[0] == "key" else f" in the order {', '.join(order)}"
            yield (
                f"{part} of {name} split as {split}{where}",
                rearrange(x, pattern, c=2, h=h)[order.index(part)],
            )


def _turned_scores(found: _Projected, value: np.ndarray) -> Forms:
    query, key = found.query, share_heads(found.key, found.query.shape[2])
    for rotation in rotations_of_scores(value, query, key):
        text = found.text.format(scale_in_words(rotation.factor, query, close=1e-6))
        scaled = rotation.factor * rotation.scores(query, key)
        yield (
            f"{text}, RoPE {replace(rotation, factor=1.0)}",
            np.where(np.isfinite(value), scaled, -np.inf),
        )
