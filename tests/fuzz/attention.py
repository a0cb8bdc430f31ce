"""Random calls of `dot_product_attention`, and what each has to return."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax_attn import KeyedDropout, dot_product_attention
from flax_attn.backends.registry import load
from flax_attn.backends.splash import interpreted

from . import formula
from .integers import Integers
from .judge import Judged
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
TILES = (16, 8)  # of blocked, where small calls have to have several
MODES = ("eager", "jit", "jit of the mask", "vmap")
NAMES = ("query", "key", "value", "bias", "sinks")
DTYPES = {"float64": 0.25, "float32": 0.4, "bfloat16": 0.2, "float16": 0.15}
FAST = {"xla_backend_optimization_level": 0}
jit = partial(jax.jit, compiler_options=FAST)


@dataclass(frozen=True)
class Attention:
    """One random call."""

    sizes: Sizes
    dtype: str
    x64: bool
    mode: str
    tiles: bool
    backends: tuple[str, ...]
    parts: tuple[Part, ...]
    tile: int | None  # of a summary
    arrays: formula.Arrays  # in float64
    data: str
    unbatched: bool
    scale: Any
    soft_cap: Any
    score: Score | None
    rate: float
    weights: bool
    gradients: bool

    def __str__(self) -> str:
        shapes = {name: x.shape for name, x in self.arrays.items()}
        mask = " & ".join(part.text for part in self.parts) or None
        lines = (
            f"{self.dtype}{', x64' if self.x64 else ''}, {self.mode}",
            f"on {', '.join(self.backends)}",
            f"{'unbatched ' if self.unbatched else ''}{shapes}, {self.data}",
            f"mask={mask}{'' if self.tile is None else f', summarised in tiles of {self.tile}'}",
            f"scale={self.scale!r}, soft_cap={self.soft_cap!r}, dropout={self.rate}, "
            f"score={self.score and self.score.name}, sinks={self.arrays.get('sinks')}",
            f"weights={self.weights}, gradients={self.gradients}, small tiles={self.tiles}",
        )
        return "\n".join(lines)

    @property
    def chooses(self) -> bool:
        """Whether the softmax is a choice of the largest, of which rounding makes the gradients."""
        return _is_huge(self.scale)

    @property
    def refusable(self) -> bool:
        return any(part.may_refuse for part in self.parts)

    @property
    def wrong(self) -> bool:
        return any(part.wrong for part in self.parts)

    @cached_property
    def dropped(self) -> np.ndarray | None:
        return formula.kept(self.rate, KEY, self.sizes.scores) if self.rate else None

    @cached_property
    def options(self) -> formula.Options:
        scale = self.sizes.h**-0.5 if self.scale is None else float(self.scale)
        cap = None if self.soft_cap is None else float(self.soft_cap)
        score = self.score and self.score.plain
        shown = visible(self.parts, self.sizes)
        return formula.Options(shown, scale, cap, score, self.dropped, self.rate)

    @cached_property
    def cotangent(self) -> np.ndarray:
        z = self.sizes
        return np.random.default_rng(5).normal(size=(z.b, z.t, z.n, z.v))

    def rounded(self, scale: float = 1.0) -> formula.Arrays:
        """Return the arrays in the dtype of the call; those of a second one are scaled."""
        with np.errstate(over="ignore"):
            return {name: _cast(x * scale, self.dtype) for name, x in self.arrays.items()}

    def check(self, backend: str) -> None:
        """Raise unless a backend returns what the formula does."""
        results = self.run(backend)
        for found, scale in zip(results, (1.0, 0.5), strict=False):
            cotangent = _cast(self.cotangent, self.dtype)
            Judged(
                self.dtype, found, self.rounded(scale), cotangent, self.options, self.chooses
            ).check()

    def run(self, backend: str) -> list[dict[str, np.ndarray]]:
        """Return output, weights and gradients; of two calls in a `vmap`."""
        with ExitStack() as stack:
            stack.enter_context(jax.enable_x64(self.x64))
            if backend == "splash":
                stack.enter_context(interpreted())
            if self.tiles:
                block, edge = TILES
                stack.enter_context(patch.object(load("blocked"), "block", block))
                stack.enter_context(patch.object(load("blocked"), "edge", edge))
            return self._run(backend)

    def _run(self, backend: str) -> list[dict[str, np.ndarray]]:
        integers = {x.name: x for part in self.parts for x in part.integers}
        as_arguments = {
            name: jnp.asarray(x.array()) for name, x in integers.items() if x.form == "jax"
        }
        cotangent = self._shaped(jnp.asarray(_cast(self.cotangent, self.dtype)))

        def attend(arrays, given, mask):
            mask = self.mask(given, integers) if mask is None else mask
            return self._attend(arrays, mask, backend, cotangent)

        arrays = self._given(1.0)
        if self.mode == "eager":
            return [attend(arrays, as_arguments, None)]
        if self.mode == "jit":
            return [jit(attend)(arrays, as_arguments, None)]
        if self.mode == "jit of the mask":
            mask = self.mask(as_arguments, integers)
            return [jit(lambda arrays, mask: attend(arrays, {}, mask))(arrays, mask)]
        both = jax.tree.map(lambda *x: jnp.stack(x), arrays, self._given(0.5))
        twice = jax.tree.map(lambda x: jnp.stack([x, x]), as_arguments)
        found = jit(jax.vmap(lambda arrays, given: attend(arrays, given, None)))(both, twice)
        return [jax.tree.map(lambda x, i=i: x[i], found) for i in range(2)]

    def mask(self, given: dict[str, Any], integers: dict[str, Integers]) -> Any:
        """Return the mask of a call that is given some integers as arrays of JAX."""

        def of(one: Integers) -> Any:
            return given[one.name] if one.name in given else one.array()

        built = [part.build(of) for part in self.parts]
        if not built:
            return None
        mask = built[0]
        for other in built[1:]:
            mask = mask & other
        if self.tile is None:
            return mask
        z = self.sizes
        return mask.summarise(z.t, z.s, b=z.b, n=z.n, tile=self.tile)

    def _given(self, scale: float) -> dict[str, Any]:
        arrays = {name: jnp.asarray(x) for name, x in self.rounded(scale).items()}
        return {name: self._shaped(x) if name in NAMES[:3] else x for name, x in arrays.items()}

    def _shaped(self, x: Any) -> Any:
        return x[0] if self.unbatched else x

    def _attend(self, arrays: Any, mask: Any, backend: str, cotangent: Any) -> dict[str, Any]:
        dropout = KeyedDropout(self.rate, jnp.asarray(KEY)) if self.rate else None
        score = self.score and self.score.traced
        call = partial(
            dot_product_attention, mask=mask, scale=self.scale, soft_cap=self.soft_cap, score=score,
            dropout=dropout, backend=backend,
        )  # fmt: skip
        if self.weights:
            output, weights = call(**arrays, return_weights=True)
            found = {"output": output, "weights": weights, "output alone": call(**arrays)}
        elif not self.gradients:
            found = {"output": call(**arrays)}
        else:
            found = {}
        if self.gradients:
            output, pull = jax.vjp(lambda arrays: call(**arrays), arrays)
            found |= pull(cotangent)[0]
            found["output in a gradient"] = output
        if self.unbatched:
            whole = {"bias", "sinks"}
            found = {name: x if name in whole else x[None] for name, x in found.items()}
        return found


KEY = np.array([3, 14], np.uint32)


def _cast(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


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
    capped = rng.random() < 0.2 and not _is_huge(drawn_scale)
    soft_cap = caps[rng.integers(len(caps))] if capped else None
    data = _draw_data(rng, score, drawn_scale)
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


def _is_huge(scale: Any) -> bool:
    return scale is not None and abs(scale) > 100


def _draw_data(rng: np.random.Generator, score: Score | None, scale: Any) -> str:
    if _is_huge(scale):
        return "whole numbers"  # whose products are exact, so that a choice of the largest is one
    pool = ["normal", "whole numbers", "hidden", "not finite"]
    weights = [0.6, 0.1, 0.15, 0.15] if score is None else [1, 0, 0, 0]
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
        arrays["sinks"] = np.where(rng.random(z.n) < 0.3, rng.choice([-np.inf, -1e4, 1e4]), sinks)
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
