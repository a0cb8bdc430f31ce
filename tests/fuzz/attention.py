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
from flax_attn import KeyedDropout, Mask, attend, dot_product_attention
from flax_attn.backends.registry import load
from flax_attn.backends.splash import interpreted

from . import formula
from .integers import Integers
from .judge import Judged
from .masks import Part, Sizes, visible
from .scores import Score

LARGEST = "largest values"
TILES = (16, 8)  # of blocked, where small calls have to have several
NAMES = ("query", "key", "value", "bias", "sinks")
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
        return is_huge(self.scale)

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
        drawn = np.random.default_rng(5).normal(size=(z.b, z.t, z.n, z.v))
        # Small enough that its product with values is finite.
        return 1e-5 * drawn if self.data == LARGEST else drawn

    def rounded(self, scale: float = 1.0) -> formula.Arrays:
        """Return the arrays in the dtype of the call; those of a second one are scaled."""
        with np.errstate(over="ignore"):
            return {name: cast(x * scale, self.dtype) for name, x in self.arrays.items()}

    def check(self, backend: str) -> None:
        """Raise unless a backend returns what the formula does."""
        results = self.run(backend)
        for found, scale in zip(results, (1.0, 0.5), strict=False):
            cotangent = cast(self.cotangent, self.dtype)
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
        cotangent = self._shaped(jnp.asarray(cast(self.cotangent, self.dtype)))

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

        built = [part.build(Mask, of) for part in self.parts]
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
        options = {"mask": mask, "scale": self.scale, "soft_cap": self.soft_cap, "score": score}
        options |= {"dropout": dropout, "backend": backend}
        call = partial(dot_product_attention, **options)
        if self.weights:
            attended = attend(**arrays, **options, return_weights=True)
            found = {"output": attended.output, "weights": attended.weights}
            found["output alone"] = call(**arrays)
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


def cast(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def is_huge(scale: Any) -> bool:
    """Return whether a factor on the scores makes a softmax a choice of the largest."""
    return scale is not None and abs(scale) > 100
