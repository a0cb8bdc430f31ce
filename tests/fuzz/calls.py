"""Random calls of `dot_product_attention`."""

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from . import formula
from .attention import LARGEST, Attention, is_huge
from .masks import Part, Sizes, draw_parts, visible
from .scores import SCORES, Score

SIZES = (
    *(Sizes(2, 6, 6, 4, 2, 3, 5), Sizes(2, 5, 9, 4, 2, 3, 5), Sizes(1, 9, 4, 2, 1, 4, 4)),
    *(Sizes(2, 1, 7, 2, 2, 4, 4), Sizes(1, 1, 1, 1, 1, 1, 1), Sizes(3, 7, 1, 6, 1, 2, 3)),
    *(Sizes(0, 6, 6, 4, 2, 3, 5), Sizes(2, 0, 9, 4, 2, 3, 5), Sizes(2, 38, 50, 4, 2, 8, 8)),
    *(Sizes(2, 38, 38, 2, 1, 16, 8), Sizes(1, 3, 300, 4, 1, 8, 8), Sizes(1, 130, 130, 2, 2, 8, 8)),
)
LARGE = (
    Sizes(1, 1100, 1100, 1, 1, 8, 8),
    Sizes(1, 600, 1300, 2, 1, 8, 4),
    Sizes(1, 1030, 40, 1, 1, 8, 8),
)
BACKENDS = ("reference", "decode", "blocked", "native", "auto", "splash")
MODES = ("eager", "jit", "jit of the mask", "vmap")
DTYPES = {"float64": 0.25, "float32": 0.4, "bfloat16": 0.2, "float16": 0.15}
SINKS = (-np.inf, -1e4, 1e4, -3e38, 3e38, np.inf, np.nan)


def draw(rng: np.random.Generator) -> Attention:
    """Return a random call."""
    large = rng.random() < 0.03
    pool = LARGE if large else SIZES
    z = pool[rng.integers(len(pool))]
    dtype = str(rng.choice(list(DTYPES), p=list(DTYPES.values())))
    x64 = dtype == "float64" or bool(rng.random() < 0.2)
    mode = str(rng.choice(MODES, p=[0.15, 0.5, 0.2, 0.15]))
    parts = draw_parts(rng, z, x64)
    tile = _draw_summary(rng, z, mode, parts)
    unbatched = z.b == 1 and mode != "vmap" and rng.random() < 0.4
    score = SCORES[rng.integers(len(SCORES))] if rng.random() < 0.12 else None
    rate = float(rng.choice([0.1, 0.5, 0.999])) if rng.random() < 0.12 else 0.0
    drawn_scale = _draw_scale(rng)
    caps = (1.5, 5, np.float32(30), 1e4)
    capped = rng.random() < 0.2 and not is_huge(drawn_scale)
    soft_cap = caps[rng.integers(len(caps))] if capped else None
    data = _draw_data(rng, score, drawn_scale)
    if rate and data == LARGEST:  # what is kept is divided, and then too large
        data = "normal"
    arrays = _draw_arrays(rng, z, dtype, data, visible(parts, z))
    plain = not rate and score is None and "bias" not in arrays and dtype != "float64"
    tiles = bool(not large and rng.random() < 0.6)
    return Attention(
        z, dtype, x64, mode, tiles, _draw_backends(rng, plain), parts, tile,
        arrays, data, unbatched, drawn_scale, soft_cap, score, rate,
        weights=bool(rng.random() < 0.15), gradients=bool(rng.random() < 0.5),
    )  # fmt: skip


def _draw_summary(
    rng: np.random.Generator, z: Sizes, mode: str, parts: tuple[Part, ...]
) -> int | None:
    traced = mode == "vmap" or mode == "jit"
    if not parts or traced or 0 in z.scores or rng.random() > 0.1:
        return None
    return int(rng.choice([1, 4, 8]))


def _draw_scale(rng: np.random.Generator) -> Any:
    usual = (-1.7, 0.0, 3, np.float32(0.3), 1e-30, 1e4, -1e4)
    return None if rng.random() < 0.6 else usual[rng.integers(len(usual))]


def _draw_data(rng: np.random.Generator, score: Score | None, scale: Any) -> str:
    if is_huge(scale):
        return "whole numbers"  # whose products are exact, so that a choice of the largest is one
    pool = ["normal", "whole numbers", "hidden", "not finite", LARGEST]
    weights = [0.55, 0.1, 0.15, 0.15, 0.05] if score is None else [1, 0, 0, 0, 0]
    return str(rng.choice(pool, p=weights))


def _draw_backends(rng: np.random.Generator, plain: bool) -> tuple[str, ...]:
    shares = [0.15, 0.2, 0.3, 0.2, 0.12, 0.03] if plain else [0.2, 0.2, 0.45, 0.02, 0.12, 0.01]
    return tuple(map(str, rng.choice(BACKENDS, size=2, replace=False, p=shares)))


def _draw_arrays(
    rng: np.random.Generator, z: Sizes, dtype: str, data: str, shown: np.ndarray
) -> formula.Arrays:
    shapes = {
        "query": (z.b, z.t, z.n, z.h),
        "key": (z.b, z.s, z.k, z.h),
        "value": (z.b, z.s, z.k, z.v),
    }
    whole = data == "whole numbers"
    draw_one = partial(rng.integers, -2, 3) if whole else rng.normal
    arrays = {name: draw_one(size=shape).astype(float) for name, shape in shapes.items()}
    if rng.random() < 0.25:
        full = tuple(1 if rng.random() < 0.3 else size for size in z.scores)
        bias = draw_one(size=full[rng.integers(5) :]).astype(float)
        arrays["bias"] = np.where(rng.random(bias.shape) < rng.choice([0, 0, 0.3]), -np.inf, bias)
    if rng.random() < 0.2:
        sinks = draw_one(size=z.n).astype(float)
        arrays["sinks"] = np.where(rng.random(z.n) < 0.3, rng.choice(SINKS), sinks)
    if data == LARGEST:
        largest = float(ml_dtypes.finfo(dtype).max)
        arrays["value"] = np.clip(arrays["value"], -0.98, 0.98) * largest
    if data == "hidden":
        _fill_hidden(rng, arrays, dtype, shown)
    if data == "not finite":
        for name in ("query", "key", "value"):
            one = rng.random(arrays[name].shape) < 0.5 / max(arrays[name].size, 1)
            arrays[name][one] = rng.choice([np.nan, np.inf, -np.inf])
    return arrays


def _fill_hidden(
    rng: np.random.Generator, arrays: formula.Arrays, dtype: str, shown: np.ndarray
) -> None:
    # What nobody may see, whatever stands there.
    query = ~shown.any(axis=(1, 3))
    key = ~shown.any(axis=(1, 2))
    largest = 6e4 if dtype == "float16" else 1e30
    for name, nobody in (("query", query), ("key", key), ("value", key)):
        arrays[name][nobody] = rng.choice([np.nan, np.inf, largest])
