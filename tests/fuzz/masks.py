"""Masks drawn at random, each with what it shows by its definition, in integers without bounds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .integers import ENDS, Integers, draw_counts, draw_ids, draw_lengths

Given = Callable[[Integers], Any]  # the integers as the call gets them


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call."""

    b: int
    t: int
    s: int
    n: int
    k: int
    h: int
    v: int

    @property
    def scores(self) -> tuple[int, int, int, int]:
        return self.b, self.n, self.t, self.s


@dataclass(frozen=True)
class Part:
    """One drawn condition.

    Args:
        text: source text of the condition in a call.
        build: function from a class `Mask` and the given arguments to the mask.
        shows: function that returns whether row b, head n, query i sees key j, for arrays of
            Python integers that broadcast.
        integers: integers in the condition.
        wrong: whether every call must refuse it.
        may_refuse: whether a call may refuse it.
    """

    text: str
    build: Callable[[type, Given], Any]
    shows: Callable[[Any, Any, Any, Any], Any]
    integers: tuple[Integers, ...] = ()
    wrong: bool = False
    may_refuse: bool = False


def visible(parts: tuple[Part, ...], z: Sizes) -> np.ndarray:
    """Return what all parts show, `(b, n, t, s)`."""
    index = np.ogrid[tuple(slice(size) for size in z.scores)]
    shown = np.ones(z.scores, bool)
    if any(part.wrong for part in parts):
        return shown
    for part in parts:
        wide = (x.astype(object) for x in index)
        shown &= np.asarray(part.shows(*wide)).astype(bool)
    return shown


def draw_parts(rng: np.random.Generator, z: Sizes, x64: bool) -> tuple[Part, ...]:
    """Return up to four parts."""
    count = int(rng.choice(5, p=[0.15, 0.4, 0.25, 0.1, 0.1]))
    makers = list(_MAKERS)
    return tuple(makers[rng.integers(len(makers))](rng, str(i), z, x64) for i in range(count))


def _of_row(integers: Integers) -> Callable[[Any], Any]:
    values = integers.values.reshape(-1)
    return lambda b: values[np.zeros_like(b, int) if len(values) == 1 else b.astype(int)]


def _draw_offset(rng: np.random.Generator, name: str, z: Sizes, x64: bool) -> Integers | None:
    if rng.random() < (0.5 if z.t == z.s else 0.03):
        return None
    near = range(-z.t, z.s + 1)
    return draw_counts(rng, f"offset {name}", near, z.b, x64)


def _positioned(
    z: Sizes, offset: Integers | None, x64: bool, *more: Integers, needs: bool = True
) -> tuple[Callable[[Any, Any], Any], dict[str, Any]]:
    """Return the position of a query, and what a part with an offset may be refused for."""
    integers = tuple(x for x in (offset, *more) if x is not None)
    facts = {
        "integers": integers,
        "wrong": needs and offset is None and z.t != z.s,
        "may_refuse": _out_of_reach(offset, z) or not (x64 or all(x.narrow for x in integers)),
    }
    if offset is None:
        return lambda b, i: i, facts
    at = _of_row(offset)
    return lambda b, i: i + at(b), facts


def _out_of_reach(offset: Integers | None, z: Sizes) -> bool:
    # Known before tracing, and beyond what makes a difference.
    if offset is None or offset.form not in ("int", "scalar"):
        return False
    return not -z.t <= int(offset.values) <= z.s


def _given(offset: Integers | None, given: Given) -> Any:
    return None if offset is None else given(offset)


def _causal(rng: np.random.Generator, name: str, z: Sizes, x64: bool) -> Part:
    offset = _draw_offset(rng, name, z, x64)
    at, facts = _positioned(z, offset, x64)
    return Part(
        f"Mask.causal({'' if offset is None else offset})",
        lambda kind, given: kind.causal(_given(offset, given)),
        lambda b, n, i, j: j <= at(b, i),
        **facts,
    )


def _window(rng: np.random.Generator, name: str, z: Sizes, x64: bool) -> Part:
    offset = _draw_offset(rng, name, z, x64)
    at, facts = _positioned(z, offset, x64)
    pool = (None, 0, 1, 2, 5, z.s, 2**30, 2**31 - 1, 2**31, 2**40, 2**64)
    left, right = (pool[rng.integers(len(pool))] for _ in range(2))

    def shows(b, n, i, j):
        position = at(b, i)
        after_left = True if left is None else position - left <= j
        return after_left & (True if right is None else j <= position + right)

    return Part(
        f"Mask.window({left}, {right}, {offset})",
        lambda kind, given: kind.window(left, right, _given(offset, given)),
        lambda b, n, i, j: np.broadcast_to(
            shows(b, n, i, j), np.broadcast_shapes(b.shape, j.shape, i.shape)
        ),
        **facts,
    )


def _sliding(rng: np.random.Generator, name: str, z: Sizes, x64: bool) -> Part:
    offset = _draw_offset(rng, name, z, x64)
    at, facts = _positioned(z, offset, x64)
    width = int(rng.choice([1, 2, 4, max(z.s - 1, 1), 2**31]))
    return Part(
        f"Mask.sliding_window({width}, {offset})",
        lambda kind, given: kind.sliding_window(width, _given(offset, given)),
        lambda b, n, i, j: (at(b, i) - width < j) & (j <= at(b, i)),
        **facts,
    )


def _lengths(rng: np.random.Generator, name: str, z: Sizes, x64: bool) -> Part:
    which = rng.integers(3)
    query = draw_lengths(rng, f"query {name}", range(-2, z.t + 3), z.b, x64) if which else None
    key = draw_lengths(rng, f"key {name}", range(-2, z.s + 3), z.b, x64) if which != 1 else None
    integers = tuple(x for x in (query, key) if x is not None)

    def shows(b, n, i, j):
        of_query = i < _of_row(query)(b) if query is not None else i == i
        return of_query & (j < _of_row(key)(b) if key is not None else j == j)

    return Part(
        f"Mask.lengths(query={query}, key={key})",
        lambda kind, given: kind.lengths(query=_given(query, given), key=_given(key, given)),
        shows,
        integers,
        may_refuse=not (x64 or all(x.narrow for x in integers)),
    )


def _prefix(rng: np.random.Generator, name: str, z: Sizes, x64: bool) -> Part:
    offset = _draw_offset(rng, name, z, x64)
    length = draw_lengths(rng, f"prefix {name}", range(-2, z.s + 3), z.b, x64)
    at, facts = _positioned(z, offset, x64, length)
    return Part(
        f"Mask.prefix({length}, {offset})",
        lambda kind, given: kind.prefix(given(length), _given(offset, given)),
        lambda b, n, i, j: (j <= at(b, i)) | (j < _of_row(length)(b)),
        **facts,
    )


def _segments(rng: np.random.Generator, name: str, z: Sizes, x64: bool) -> Part:
    pools = (
        (0, 1, 2),
        (-1, 0, 1),
        (0, 127, 128, 255, 256),
        (*ENDS, 2**32 - 1, -(2**63), 2**64 - 1),
    )
    pool = pools[rng.integers(len(pools))]
    shapes = [[(size,), (1, size), (z.b, size)][rng.integers(3)] for size in (z.t, z.s)]
    query = draw_ids(rng, f"query ids {name}", shapes[0], pool, x64)
    alone = rng.random() < 0.3
    key = query if alone else draw_ids(rng, f"key ids {name}", shapes[1], pool, x64)
    integers = (query,) if alone else (query, key)

    def of(ids, b, token):
        rows = np.atleast_2d(ids.values)
        return rows[np.zeros_like(b, int) if len(rows) == 1 else b.astype(int), token.astype(int)]

    return Part(
        f"Mask.segments({query}{'' if alone else f', {key}'})",
        lambda kind, given: kind.segments(given(query), None if alone else given(key)),
        lambda b, n, i, j: of(query, b, i) == of(key, b, j),
        integers,
        wrong=alone and z.t != z.s,
        may_refuse=not (x64 or all(x.narrow for x in integers)),
    )


def _dense(rng: np.random.Generator, name: str, z: Sizes, x64: bool) -> Part:
    full = tuple(1 if rng.random() < 0.3 else size for size in z.scores)
    shape = full[rng.integers(3) :]  # of rank 4, 3 or 2
    array = rng.random(shape) < rng.choice([0.1, 0.5, 0.9])
    plain = bool(rng.random() < 0.5)
    full_array = np.broadcast_to(array, z.scores)

    return Part(
        f"{'' if plain else 'Mask.dense'}(rng.random({shape}) < ...)",
        lambda kind, given: kind() & array if plain else kind.dense(array),
        lambda b, n, i, j: full_array[tuple(x.astype(int) for x in (b, n, i, j))],
    )


_RULES = {
    "strided": lambda b, n, i, j: (i - j) % 3 != 1,
    "near": lambda b, n, i, j: abs(i - j) < 4,
    "by row and head": lambda b, n, i, j: (b + n + i + j) % 2 == 0,
    "of keys": lambda b, n, i, j: j % 4 < 3,
    "of a constant": lambda b, n, i, j: b == b,
}


def _where(rng: np.random.Generator, name: str, z: Sizes, x64: bool) -> Part:
    rule = str(rng.choice(list(_RULES)))
    offset = None
    if rng.random() < 0.4:
        offset = draw_counts(rng, f"offset {name}", range(-z.t, z.s + 1), z.b, x64, far=0.0)
    at, facts = _positioned(z, offset, x64, needs=False)
    # Without an offset it is 0, whatever the sizes.
    function = _RULES[rule]
    return Part(
        f"Mask.where(<{rule}>, {offset})",
        lambda kind, given: kind.where(function, _given(offset, given)),
        lambda b, n, i, j: function(b, n, at(b, i), j),
        **facts,
    )


_MAKERS = (_causal, _window, _sliding, _lengths, _prefix, _segments, _dense, _where)
