"""Rotary positions, in plain NumPy: measure the angles of feature pairs in heads or scores.

What is measured is named afterwards: a base, a scaling, positions that are counted otherwise.
Nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

DIGITS = range(1, 8)  # of a base, or of a divisor: as few as describe the angles
ANGLES = (1e-11, 1e-6)  # how far off angles may be, in float64 and in float32
TOKENS = 64  # up to which the end of a table of angles is searched for
FEWEST = 3  # rows of such a table
BASES = (10000.0, 500000.0, 1000000.0)  # that are tried where scores are too few to measure one
SAME = 1e-4  # of the largest score: how far off others may be with angles in a lower dtype


@dataclass(frozen=True)
class Rotation:
    """Pair p of a token at position i is turned by the angle `(i + start) * frequencies[p]`.

    Args:
        frequencies: frequency of each pair, in radians per token.
        interleaved: whether pairs are `(2p, 2p + 1)`, not `(p, p + width / 2)`.
        width: the number of features that are turned, the first of each head.
        h: the width of a head.
        start: the position of the first token; for scores, the offset of queries from keys.
        end: position at which positions stop, as at the end of a table of angles.
        factor: factor on the turned features.
        alone: "queries" or "keys" where only these are turned in scores.
    """

    frequencies: np.ndarray
    interleaved: bool
    width: int
    h: int
    start: float = 0.0
    end: int | None = None
    factor: float = 1.0
    alone: str = ""

    def positions(self, tokens: int) -> np.ndarray:
        """Return the positions of tokens, without `start`."""
        return np.minimum(np.arange(tokens), tokens if self.end is None else self.end)

    def heads(self, x: np.ndarray) -> np.ndarray:
        """Return heads `(b, t, n, h)`, turned."""
        angles = np.multiply.outer(self.positions(x.shape[1]) + self.start, self.frequencies)[
            :, None
        ]
        z = _pairs(x, self.interleaved, self.width) * np.exp(1j * angles)
        parts = np.stack([np.real(z), np.imag(z)], -1 if self.interleaved else -2).reshape(
            *x.shape[:-1], self.width
        )
        return self.factor * np.concatenate([parts, x[..., self.width :]], -1)

    def scores(self, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        """Return `query . key` as `(b, n, t, s)`, both turned or one alone, with as many heads."""
        ahead = replace(self, factor=1.0)
        query = query if self.alone == "keys" else ahead.heads(query)
        key = key if self.alone == "queries" else replace(ahead, start=0.0).heads(key)
        return np.einsum("btnh,bsnh->bnts", query, key)

    def __str__(self) -> str:
        """Return it in words.

        Example:
            >>> str(Rotation(10000.0 ** (-np.arange(4) / 4) / 2, False, 8, 8))
            'half-split, base 10000, positions divided by 2'
        """
        turned = self.frequencies[: np.flatnonzero(np.abs(self.frequencies) > ANGLES[1])[-1] + 1]
        backwards = bool((turned < 0).all())
        kind = "interleaved" if self.interleaved else "half-split"
        part = 2 * len(turned) if self.interleaved else self.width
        text = [kind, _frequencies(np.abs(turned))]
        text += [f"of {self.alone} alone"] if self.alone else []
        text += [f"the first {part} features of each head"] if part < self.h else []
        text += ["turned backwards"] if backwards else []
        text += [f"positions shifted by {self.start:g}"] if self.start else []
        text += (
            [f"positions that end at {self.end}, as those of a table of {self.end + 1} rows"]
            if self.end
            else []
        )
        return ", ".join(text) + (
            f", times {self.factor:.6g}" if abs(self.factor - 1) > ANGLES[1] else ""
        )


def _pairs(x: np.ndarray, interleaved: bool, width: int) -> np.ndarray:
    """Return the pairs of the first features as complex numbers."""
    if interleaved:
        return x[..., 0:width:2] + 1j * x[..., 1:width:2]
    return x[..., : width // 2] + 1j * x[..., width // 2 : width]


def _ways(h: int) -> Iterator[tuple[bool, int]]:
    """Yield the possible pairings; interleaved features that do not turn have frequency 0."""
    if h % 2 == 0:
        yield from ((False, h), (True, h))
    yield from (
        (False, width) for width in (3 * h // 4, h // 2, h // 4) if width and width % 2 == 0
    )


# The words.


def _frequencies(found: np.ndarray) -> str:
    for angle in ANGLES:
        for divisor in _rounded(1 / found[0]):
            scaled = f", positions divided by {divisor:g}" if divisor != 1 else ""
            if len(found) == 1 and abs(found[0] - 1 / divisor) <= angle:
                return f"one pair{scaled}"
            for base in _rounded((found[0] / found[1]) ** len(found)) if len(found) > 1 else ():
                off = np.abs(found - _powers(base, len(found)) / divisor)
                if off.max() <= angle:
                    return f"base {base:.7g}{scaled}"
    return _slowed(found) or f"frequencies {', '.join(f'{f:.3g}' for f in found[:4])}" + ", ..." * (
        len(found) > 4
    )


def _rounded(number: float) -> list[float]:
    return [float(f"{number:.{digits}g}") for digits in DIGITS]


def _powers(base: float, pairs: int) -> np.ndarray:
    return base ** (-np.arange(pairs) / pairs)


def _slowed(found: np.ndarray) -> str:
    # Fast pairs are as they were; slow ones are divided, in between by less: llama3, YaRN.
    if len(found) < 3 or abs(found[0] - 1) > ANGLES[1]:
        return ""
    for base in _rounded((found[0] / found[1]) ** len(found)):
        divided = _powers(base, len(found)) / found
        if abs(divided[1] - 1) <= ANGLES[1] / found[1] and (np.diff(divided) > -ANGLES[1]).all():
            return (
                f"base {base:.7g}, slow pairs divided by up to {divided[-1]:.4g} as by llama3"
                " scaling or YaRN"
            )
    return ""


# The measurements.


def rotations_of_heads(value: np.ndarray, x: np.ndarray) -> Iterator[Rotation]:
    """Yield the rotations that may turn the heads `x` `(b, t, n, h)` into `value`.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(1, 3, 1, 4))
        >>> turned = Rotation(np.array([1, 0.1]), False, 4, 4).heads(x)
        >>> str(next(rotations_of_heads(turned, x)))
        'half-split, base 100'
    """
    if value.shape[1] < 2:
        return
    for interleaved, width in _ways(value.shape[-1]):
        z, turned = (_pairs(heads, interleaved, width) for heads in (x, value))
        turn = (turned * z.conj()).sum((0, 2)) / (np.abs(z) ** 2).sum((0, 2))  # (t, pairs)
        steps = np.angle(turn[1:] / turn[:-1])
        if not np.isfinite(steps).all() or not np.abs(steps[0]).max() > ANGLES[1]:
            continue
        start = float(np.round(np.angle(turn[0, 0]) / steps[0, 0])) if steps[0, 0] else 0.0
        still = np.flatnonzero(np.abs(steps).max(-1) <= ANGLES[1])
        end = int(still[0]) if still.size else None
        factor = float(np.abs(turn).mean()) if width == x.shape[-1] else 1.0
        yield Rotation(steps[0], interleaved, width, x.shape[-1], start, end, factor)


def rotations_of_scores(
    value: np.ndarray, query: np.ndarray, key: np.ndarray
) -> Iterator[Rotation]:
    """Yield the possible rotations in the scores `value` `(b, n, t, s)`, with the scale as factor.

    A score at the distance `i - j` is a linear function of the cosine and the sine by which each
    pair is turned there. They solve a linear system, with an equation for each example, head and
    token.

    Args:
        value: the scores, -inf where they are hidden.
        query: queries `(b, t, n, h)`, not turned.
        key: keys `(b, s, n, h)`, not turned.
    """
    ways = [_Products(value, query, key, *way) for way in _ways(query.shape[-1])]
    tokens = min(value.shape[-2:])
    ends = range(tokens - 2, FEWEST - 2, -1) if tokens <= TOKENS else ()
    likely = [products.is_turned(np.arange(tokens)) for products in ways]
    for end in (None, *ends):
        for products, turned in list(zip(ways, likely, strict=True))[: None if end is None else 2]:
            if turned:
                yield from products.rotation(tokens if end is None else end + 1, end)
    for products in ways:
        yield from products.rotation_of_queries()
        yield from products.rotation_of_keys()


class _Products:
    """The products of each feature pair of queries with that of keys; scores are their sums."""

    def __init__(
        self, value: np.ndarray, query: np.ndarray, key: np.ndarray, interleaved: bool, width: int
    ):
        self.value, self.interleaved, self.width, self.h = (
            value,
            interleaved,
            width,
            query.shape[-1],
        )
        first, second = (_pairs(x, interleaved, width) for x in (query, key))
        self.pairs = np.einsum("btnp,bsnp->bntsp", first, second.conj())
        self.rest = np.einsum("btnh,bsnh->bnts", query[..., width:], key[..., width:])

    def rotation(self, rows: int, end: int | None) -> Iterator[Rotation]:
        """Yield the rotation that fits the first rows of tokens at distances 0 and 1, if any."""
        near, far = (
            self.turns(keys + i, keys)
            for i, keys in enumerate((np.arange(rows), np.arange(rows - 1)))
        )
        if near is None or far is None or not near.all():
            yield from self.known() if end is None else ()
            return
        frequencies, ahead = np.angle(far / near), np.angle(near)
        if np.isfinite(frequencies).all() and np.abs(frequencies).max() > ANGLES[1]:
            start = (
                float(np.round(ahead[0] / frequencies[0]))
                if abs(frequencies[0]) > ANGLES[1]
                else 0.0
            )
            factor = float(np.abs(near).mean())
            yield Rotation(frequencies, self.interleaved, self.width, self.h, start, end, factor)

    def rotation_of_queries(self) -> Iterator[Rotation]:
        """Yield the rotation of queries alone, from the last two, which see the most keys."""
        t, s = self.value.shape[-2:]
        near, far = (self.turns(np.full(s, i), np.arange(s)) for i in (t - 2, t - 1))
        yield from self.alone("queries", near, far)

    def rotation_of_keys(self) -> Iterator[Rotation]:
        """Yield the rotation of keys alone, from the first two, which most queries see."""
        t = self.value.shape[-2]
        near, far = (self.turns(np.arange(t), np.full(t, j)) for j in (0, 1))
        yield from self.alone("keys", near, far)

    def alone(
        self, which: str, near: np.ndarray | None, far: np.ndarray | None
    ) -> Iterator[Rotation]:
        """Yield the rotation of one side of the scores, from the turns of two neighbours."""
        if near is None or far is None or not near.all():
            return
        frequencies = np.angle(far / near) * (1 if which == "queries" else -1)
        if np.isfinite(frequencies).all() and np.abs(frequencies).max() > ANGLES[1]:
            factor = float(np.abs(near).mean())
            yield Rotation(
                frequencies, self.interleaved, self.width, self.h, factor=factor, alone=which
            )

    def known(self) -> Iterator[Rotation]:
        """Yield the rotations by known bases, with the scale that fits best."""
        distance, seen = (
            np.subtract.outer(*map(np.arange, self.value.shape[-2:])),
            np.isfinite(self.value),
        )
        for base in BASES:
            frequencies = _powers(base, self.pairs.shape[-1])
            turned = self.pairs * np.exp(1j * np.multiply.outer(distance, frequencies))
            scores = (turned.real.sum(-1) + self.rest)[seen]
            factor = float(scores @ self.value[seen] / (scores @ scores))
            yield Rotation(frequencies, self.interleaved, self.width, self.h, factor=factor)

    def turns(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray | None:
        """Return the common `scale * exp(i * angle)` of each pair; None if too little is seen."""
        matrix, scores = self.system(queries, keys)
        if len(scores) < matrix.shape[1] or not np.isfinite(matrix).all():
            return None
        found, count = np.linalg.lstsq(matrix, scores, rcond=None)[0], self.pairs.shape[-1]
        return found[:count] + 1j * found[count : 2 * count]

    def is_turned(self, tokens: np.ndarray) -> bool:
        """Return whether the scores of tokens with themselves fit one turn of each pair."""
        matrix, scores = self.system(tokens, tokens)
        if len(scores) <= matrix.shape[1] or not np.isfinite(matrix).all():
            return True
        rest = matrix @ np.linalg.lstsq(matrix, scores, rcond=None)[0] - scores
        return bool(np.abs(rest).max() <= SAME * np.abs(scores).max())

    def system(self, queries: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the linear system of scaled cosines and sines: one equation per visible score."""
        scores, rest = (x[..., queries, keys].reshape(-1) for x in (self.value, self.rest))
        pairs = self.pairs[..., queries, keys, :].reshape(len(scores), -1)
        matrix = np.concatenate(
            [pairs.real, -pairs.imag, rest[:, None]][: 3 if rest.any() else 2], -1
        )
        seen = np.isfinite(scores)
        return matrix[seen], scores[seen]
