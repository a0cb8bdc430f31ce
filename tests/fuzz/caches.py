"""Sequences that a cache is given in chunks, which have to attend as the whole does."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax_attn import KVCache, Mask, dot_product_attention

from . import formula
from .attention import cast, jit
from .integers import Integers, draw_counts
from .judge import Judged, Wrong
from .masks import Sizes

BACKENDS = ("reference", "decode", "blocked", "native", "auto")


@dataclass(frozen=True)
class Chunk:
    """Some tokens of each row, of which the first few are real; None is all."""

    tokens: int
    lengths: Integers | None

    def real(self, b: int) -> np.ndarray:
        if self.lengths is None:
            return np.full(b, self.tokens)
        return np.broadcast_to(self.lengths.values, b).astype(int)

    def __str__(self) -> str:
        return f"{self.tokens} (lengths {self.lengths})"


@dataclass(frozen=True)
class Cached:
    """One sequence a row, in chunks."""

    sizes: Sizes  # of a whole call: t is ignored, s is the capacity
    dtype: str
    x64: bool
    compiled: bool
    static: bool  # whether the cache knows its length before tracing
    window: int | None  # of a ring buffer
    mask: str
    chunks: tuple[Chunk, ...]
    backends: tuple[str, ...]
    refusable: bool = False

    def __str__(self) -> str:
        z = self.sizes
        kind = f"a ring buffer for a window of {self.window}" if self.window else "a cache"
        return (
            f"{kind} of {z.s} slots, b={z.b}, n={z.n}, k={z.k}, {self.dtype}"
            f"{', x64' if self.x64 else ''}{', compiled' if self.compiled else ''}"
            f"{', length known' if self.static else ''}, {self.mask} mask\n"
            f"on {', '.join(self.backends)}\n"
            f"chunks of {', '.join(map(str, self.chunks))}"
        )

    @property
    def over(self) -> np.ndarray:
        """Which rows get more tokens than fit, with the last chunk."""
        total = sum(chunk.real(self.sizes.b) for chunk in self.chunks)
        return (total > self.sizes.s) & (self.window is None)

    @property
    def wrong(self) -> bool:
        """Whether it is known before tracing that tokens do not fit."""
        return self.static and self._lengths_are_static and bool(self.over.any())

    @cached_property
    def chunks_given(self) -> list[formula.Arrays]:
        """The tokens of each chunk; NaN behind its lengths."""
        rng, z = np.random.default_rng(6), self.sizes
        given = []
        for chunk in self.chunks:
            shapes = {"query": (z.n, z.h), "key": (z.k, z.h), "value": (z.k, z.v)}
            arrays = {
                name: rng.normal(size=(z.b, chunk.tokens, *tail)) for name, tail in shapes.items()
            }
            padding = np.arange(chunk.tokens) >= chunk.real(z.b)[:, None]
            for x in arrays.values():
                x[padding] = np.nan
            given.append({name: cast(x, self.dtype) for name, x in arrays.items()})
        return given

    def check(self, backend: str) -> None:
        """Raise unless each chunk attends as its rows of the whole."""
        with jax.enable_x64(self.x64):
            self._check(backend)

    def _check(self, backend: str) -> None:
        z = self.sizes
        cache = KVCache.zeros(
            z.b, z.s, z.k, z.h, value_dim=z.v, dtype=self.dtype, window=self.window
        )
        if self.static:
            cache = cache.replace(length=0)
        step = self._step(backend)
        before: list[formula.Arrays] = []
        for chunk, arrays in zip(self.chunks, self.chunks_given, strict=True):
            lengths = None if chunk.lengths is None else chunk.lengths.array()
            if chunk.lengths is not None and chunk.lengths.form in ("jax", "numpy"):
                lengths = jnp.asarray(lengths)
            given = {name: jnp.asarray(x) for name, x in arrays.items()}
            output, cache = step(given, cache, lengths)
            before.append(arrays)
            self._compare(before, output)
        if not np.array_equal(cache.invalid, self.over):
            raise Wrong(f"rows {cache.invalid} are invalid, and tokens of {self.over} do not fit")

    def _step(self, backend: str) -> Any:
        def step(given, cache, lengths):
            mask = self._mask()
            extended = cache.extend(given["key"], given["value"], mask, lengths)
            output = dot_product_attention(
                given["query"], extended.key, extended.value, mask=extended.mask, backend=backend
            )
            return output, extended.cache

        return (
            jit(step, static_argnums=2 if self._lengths_are_static else ())
            if self.compiled
            else step
        )

    def _mask(self) -> Mask | None:
        """Return the mask of the whole sequence."""
        if self.mask == "none":
            return None
        if self.mask == "prefix":
            return Mask.prefix(3, 0)
        if self.mask == "segments":
            return Mask.segments(jnp.arange(self.sizes.s) // 4) & Mask.causal(0)
        return Mask.causal(0)

    @property
    def _lengths_are_static(self) -> bool:
        forms = {chunk.lengths.form for chunk in self.chunks if chunk.lengths is not None}
        return forms <= {"int", "scalar"}

    def _compare(self, before: list[formula.Arrays], output: Any) -> None:
        z, now = self.sizes, len(before) - 1
        output = np.asarray(output)
        last = now + 1 == len(self.chunks)
        for row in np.flatnonzero(~self.over) if last else range(z.b):
            real = [chunk.real(z.b)[row] for chunk in self.chunks[: now + 1]]
            whole = {
                name: np.concatenate(
                    [x[name][row, :count] for x, count in zip(before, real, strict=True)]
                )[None]
                for name in ("key", "value")
            }
            new = real[-1]
            query = before[-1]["query"][row, :new][None]
            if output[row, new:].any():
                raise Wrong(f"chunk {now}: padding of row {row} has an output that is not 0")
            if not new:
                continue
            start = sum(real[:-1])
            options = formula.Options(self._visible(start, new, start + new), z.h**-0.5)
            zeros = np.zeros((1, new, z.n, z.v), query.dtype)
            found = {"output": output[row, :new][None]}
            try:
                Judged(self.dtype, found, {"query": query, **whole}, zeros, options).check()
            except Wrong as wrong:
                raise Wrong(f"chunk {now}, row {row}: {wrong}") from None

    def _visible(self, start: int, new: int, total: int) -> np.ndarray:
        i, j = start + np.arange(new)[:, None], np.arange(total)[None]
        shown = np.ones((new, total), bool)
        if self.mask in ("causal", "segments") or self.window:
            shown = shown & (j <= i)
        if self.mask == "prefix":
            shown = shown & ((j <= i) | (j < 3))
        if self.mask == "segments":
            shown = shown & (i // 4 == j // 4)
        if self.window:
            shown = shown & (j > i - self.window)
        return shown[None, None]


def draw(rng: np.random.Generator) -> Cached:
    """Return a random sequence."""
    b = int(rng.choice([1, 2, 3]))
    window = int(rng.choice([1, 2, 3, 5])) if rng.random() < 0.4 else None
    capacity = (window or 0) + int(rng.choice([0, 1, 3])) if window else 12
    dtype = str(rng.choice(["float64", "float32", "bfloat16"], p=[0.5, 0.3, 0.2]))
    x64 = dtype == "float64"
    static, compiled = bool(rng.random() < 0.3), bool(rng.random() < 0.6)
    masks = ["causal"] if window else ["causal", "none", "prefix", "segments"]
    mask = str(rng.choice(masks))
    chunks: list[Chunk] = []
    stored = np.zeros(b, int)
    padded = rng.random() < 0.5
    arrays = bool(rng.random() < 0.6)
    for i in range(int(rng.choice([2, 3, 4]))):
        tokens = int(rng.choice([1, 2, 4, 5]))
        lengths = _draw_lengths(rng, i, tokens, b, x64, arrays) if padded else None
        chunk = Chunk(tokens, lengths)
        stored = stored + chunk.real(b)
        over = window is None and (stored > capacity).any()
        if not over or rng.random() < 0.5:
            chunks.append(chunk)
        if over:
            break
    backends = tuple(map(str, rng.choice(BACKENDS, size=2, replace=False)))
    sizes = Sizes(b, 0, capacity, 4, 2, 4, 3)
    return Cached(sizes, dtype, x64, compiled, static, window, mask, tuple(chunks), backends)


def _draw_lengths(
    rng: np.random.Generator, i: int, tokens: int, b: int, x64: bool, arrays: bool
) -> Integers:
    forms = {"jax", "numpy"} if arrays else {"int"}
    while True:
        drawn = draw_counts(rng, f"lengths {i}", range(tokens + 1), b, x64, far=0.0)
        if drawn.form in forms:
            return drawn
