"""What a step of attention may be: the right form first, then the forms that ports are known for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.trace import attention_formula as formula

Forms = Iterator[tuple[str, np.ndarray]]
BASES = (10000.0, 500000.0, 1000000.0)


def heads(value: np.ndarray, other: np.ndarray, sources: Arrays) -> Forms:
    """Queries, keys or values: the heads of a projection, turned or not."""
    if value.ndim != 4:
        return
    b, t, n, h = value.shape
    projections = {name: x.reshape(b, t, n * h) for name, x in sources.items() if x.shape[-2:] == (t, n * h)}
    split = {name: formula.split_heads(x, n) for name, x in projections.items()}
    for name, ways in split.items():
        yield from ((f"{name}, {way}", x) for way, x in ways.items())
    for name, ways in split.items() if value.shape[-1] % 2 == 0 else ():
        yield from _turned(name, next(iter(ways.values())))


def _turned(name: str, x: np.ndarray) -> Forms:
    for shift in (0, 1, -1):
        for base in BASES:
            for interleaved in (False, True):
                for sign in (1, -1):
                    kind = "interleaved" if interleaved else "half-split"
                    text = f"RoPE of {name}, {kind}, base {base:g}"
                    text += ", turned backwards" if sign < 0 else ""
                    text += f", positions shifted by {shift}" if shift else ""
                    yield text, formula.rope(x, base, interleaved=interleaved, sign=sign, shift=shift)


def scores(value: np.ndarray, other: np.ndarray, sources: Arrays) -> Forms:
    """Scores, or what is visible of them: every query with every key."""
    if not {"query", "key"} <= sources.keys():
        return
    query, key = sources["query"], sources["key"]
    visible = np.isfinite(value)
    for text, q, k, tile in _products(query, key):
        raw = formula.scores(q, k, scale=1.0, tile=tile)
        if raw.shape == value.shape and raw[visible].any():
            scale = float((raw[visible] @ value[visible]) / (raw[visible] @ raw[visible]))
            yield f"{text} {_scale(scale, query)}", np.where(visible, raw * scale, -np.inf)


def _products(query: np.ndarray, key: np.ndarray) -> Iterator[tuple[str, np.ndarray, np.ndarray, bool]]:
    yield "query . key", query, key, False
    if 1 < key.shape[2] < query.shape[2]:
        yield "query . key with key heads tiled, not repeated,", query, key, True
    if query.shape == key.shape:
        yield "key . query, the two swapped,", key, query, False


def _scale(scale: float, query: np.ndarray) -> str:
    n, h = query.shape[-2:]
    known = {"/ sqrt(h)": h**-0.5, "without a scale": 1.0, "/ sqrt(d_out)": (n * h) ** -0.5, "/ h": 1 / h}
    return next((text for text, number in known.items() if np.isclose(scale, number, rtol=1e-9)), f"* {scale:.6g}")


def masked(value: np.ndarray, other: np.ndarray, sources: Arrays) -> Forms:
    """Which scores are hidden, and by what."""
    t, s = value.shape[-2:]
    kept = np.where(np.isfinite(value), value, 0)
    for offset in sorted(range(1 - t, s - 1), key=abs):
        at = "its own key" if offset == 0 else f"{abs(offset)} {'after' if offset > 0 else 'before'} its own key"
        yield f"a causal mask, each query sees up to {at}", np.where(formula.causal(t, s, offset), kept, -np.inf)
    seen_there = np.isfinite(other)
    yield "the mask of the other side inverted", np.where(seen_there, -np.inf, kept)
    if "scores" in sources:
        yield from _filled(value, kept, seen_there, sources["scores"])
        yield "a mask that hides nothing", sources["scores"]
        yield "a mask that is not causal", np.where(np.isfinite(value), sources["scores"], -np.inf)


def _filled(value: np.ndarray, kept: np.ndarray, seen_there: np.ndarray, scores: np.ndarray) -> Forms:
    # Hidden by a number, and not by -inf: it still counts.
    filled, added = value[~seen_there], (value - scores)[~seen_there]
    if filled.size > 1 and np.isfinite(filled).all():
        fill, extra = float(np.median(filled)), float(np.median(added))
        yield f"a mask that puts {fill:g} where the other side hides", np.where(seen_there, kept, fill)
        if extra:
            text = f"a mask that adds {extra:g} where the other side hides"
            yield text, np.where(seen_there, kept, scores + extra)


def weights(value: np.ndarray, other: np.ndarray, sources: Arrays) -> Forms:
    """The softmax."""
    if "masked" not in sources:
        return
    hidden = sources["masked"]
    yield "softmax over the keys", formula.softmax(hidden)
    yield "softmax over the queries", formula.softmax(hidden, axis=-2)
    yield "softmax over the heads", formula.softmax(hidden, axis=1)
    yield "softmax over the keys, the mean where nothing is visible", formula.softmax(hidden, empty=1 / value.shape[-1])
    if "scores" in sources:
        early = formula.softmax(sources["scores"])
        yield "softmax before the mask, not divided anew", np.where(np.isfinite(hidden), early, 0)


def context(value: np.ndarray, other: np.ndarray, sources: Arrays) -> Forms:
    """The sum of the values."""
    if not {"weights", "value"} <= sources.keys():
        return
    yield "weights . value", formula.context(sources["weights"], sources["value"])
    if 1 < sources["value"].shape[2] < sources["weights"].shape[1]:
        text = "weights . value with value heads tiled, not repeated"
        yield text, formula.context(sources["weights"], sources["value"], tile=True)


def joined(value: np.ndarray, other: np.ndarray, sources: Arrays) -> Forms:
    """Heads side by side again."""
    for name, x in sources.items():
        if x.ndim == 4 and x.size == value.size and x.shape[:2] == np.reshape(value, (-1, *value.shape[-2:])).shape[:2]:
            yield from ((f"{name}, {way}", y.reshape(value.shape)) for way, y in formula.join_heads(x).items())


STEPS: dict[str, tuple[Callable[[np.ndarray, np.ndarray, Arrays], Forms], ...]] = {
    "query": (heads,),
    "key": (heads,),
    "value": (heads,),
    "scores": (scores,),
    "masked": (masked, scores),
    "weights": (weights,),
    "context": (context,),
}
