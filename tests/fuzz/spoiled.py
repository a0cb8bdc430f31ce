"""Calls with one argument that no backend may take: each has to refuse it, in our own words."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from flax_attn import KeyedDropout, Mask, dot_product_attention

from .judge import Wrong

BACKENDS = ("reference", "decode", "blocked", "native", "auto")
B, T, S, N, K, H = 2, 5, 7, 4, 2, 3
FLOAT8 = (
    ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3b11fnuz, ml_dtypes.float8_e4m3,
    ml_dtypes.float8_e3m4, ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn,
)  # fmt: skip


def _as(dtype: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {name: x.astype(dtype) for name, x in _inputs().items()}


def _replaced(name: str, value: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {name: value()}


def _inputs() -> dict[str, Any]:
    shapes = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, H)}
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def _ones(*shape: int, dtype: Any = jnp.float32) -> Callable[[], Any]:
    return lambda: jnp.ones(shape, dtype)


VALUES: dict[str, tuple[Callable[[], Any], ...]] = {
    "query": (
        lambda: None, lambda: [[1.0]], lambda: 1.0, lambda: "query", Mask.causal, _ones(T), _ones(B, T, N),
        _ones(1, B, T, N, H), _ones(B, T, N, H + 1), _ones(B, T, 0, H), _ones(B + 1, T, N, H), _ones(B, T, 3, H),
    ),
    "key": (lambda: None, lambda: [1.0], _ones(B, 0, K, H), _ones(B, S + 1, K, H), _ones(S, K, H)),
    "value": (lambda: None, lambda: [1.0], _ones(B, S, K, 0), _ones(B, S, K + 1, H), _ones(B, S, K, H, dtype=jnp.int32)),
    "bias": (
        Mask.causal, lambda: [1.0], lambda: 1.0, lambda: "bias", _ones(T, S, dtype=bool), _ones(T, S, dtype=jnp.int8),
        _ones(S, T), _ones(1, B, N, T, S), _ones(T, S, dtype=jnp.complex64), _ones(B, 3, T, S),
    ),
    "mask": (
        lambda: "causal", lambda: 3, lambda: 1.5, lambda: [1.0], _ones(T, S), _ones(T, S, dtype=jnp.int32),
        _ones(S, T, dtype=bool), _ones(1, 1, 1, T, S, dtype=bool), Mask.causal, lambda: Mask.causal(1.5),
        lambda: Mask.causal("1"), lambda: Mask.causal(True), lambda: Mask.causal(np.zeros(B + 1, int)),
        lambda: Mask.causal(10**6), lambda: Mask.window(-1, 0, 0), lambda: Mask.window(1.5, 0, 0),
        lambda: Mask.window(jnp.int32(2), 0, 0), lambda: Mask.sliding_window(0, 0), lambda: Mask.sliding_window(2.0, 0),
        lambda: Mask.lengths(key=1.5), lambda: Mask.lengths(key=np.ones(B)), lambda: Mask.lengths(query=[1, 2, 3]),
        lambda: Mask.lengths(key=np.ones((B, 1), int)), lambda: Mask.segments(np.zeros(T, int)),
        lambda: Mask.segments(np.zeros(T), np.zeros(S)), lambda: Mask.segments(np.zeros((3, T), int), np.zeros(S, int)),
        lambda: Mask.segments(0, 0), lambda: Mask.prefix(1.5, 0), lambda: Mask.prefix("1", 0),
        lambda: Mask.prefix(2), lambda: Mask.dense(np.ones((T, S))), lambda: Mask.dense("mask"),
        lambda: Mask.where(3), lambda: Mask.where(lambda i, j: i > j), lambda: Mask.where(lambda b, n, i, j: i - j),
        lambda: Mask.where(lambda b, n, i, j: True if i > j else False), lambda: Mask() & "mask",
    ),
    "scale": (
        _ones(S), _ones(1), lambda: 1j, lambda: "1", lambda: [1.0], lambda: np.ones(S), lambda: True,
        _ones(dtype=jnp.complex64), Mask.causal,
    ),
    "soft_cap": (
        lambda: 0, lambda: -1.0, lambda: float("nan"), lambda: "1", lambda: [1.0], _ones(N), lambda: 1j,
        lambda: True, Mask.causal,
    ),
    "score": (
        lambda: 3, lambda: lambda score: score, lambda: lambda score, b, n, i, j: (score, score),
        lambda: lambda score, b, n, i, j: i, lambda: lambda score, b, n, i, j: None,
        lambda: lambda score, b, n, i, j: score if i > j else score + 1,
        lambda: lambda score, b, n, i, j: jnp.stack([score, score]),
    ),
    "sinks": (
        _ones(N + 1), _ones(1, N), _ones(), lambda: 0.0, lambda: [0.0] * N, lambda: "sinks",
        _ones(N, dtype=jnp.int32), _ones(N, dtype=bool), Mask.causal,
    ),
    "dropout": (
        lambda: 0.1, lambda: "0.1", lambda: KeyedDropout(1.0, np.zeros(2, np.uint32)), lambda: jax.random.key(0),
        lambda: KeyedDropout(0.5, 3), lambda: KeyedDropout(0.5, np.zeros((2, 2), np.uint32)),
        lambda: KeyedDropout("0.5", np.zeros(2, np.uint32)), lambda: KeyedDropout(0.5, np.zeros(2)),
    ),
    "precision": (lambda: "nonsense", lambda: 3, lambda: [1.0, 2.0]),
    "backend": (lambda: "nonsense", lambda: None, lambda: 3, lambda: ["native"]),
}  # fmt: skip
TRACED = {  # what is known only while tracing, and cannot be taken then
    "soft_cap": 1.5,
}
CHANGES = (
    *((f"dtype {np.dtype(dtype).name}", _as(dtype)) for dtype in (*FLOAT8, "int32", "bool", "complex64", "uint8")),
    *(
        (f"{name}, choice {i}", _replaced(name, value))
        for name, values in VALUES.items()
        for i, value in enumerate(values)
    ),
)


@dataclass(frozen=True)
class Spoiled:
    """One call that has to be refused."""

    name: str
    change: Callable[[], dict[str, Any]]
    compiled: bool
    backends: tuple[str, ...]
    wrong: bool = True
    refusable: bool = True

    def __str__(self) -> str:
        return f"spoiled: {self.name}{', compiled' if self.compiled else ''}, on {', '.join(self.backends)}"

    def check(self, backend: str) -> None:
        """Make the call, which has to raise."""
        given = {**_inputs(), "mask": None, "backend": backend}
        given |= self.change()
        arrays = {name: x for name, x in given.items() if isinstance(x, jax.Array)}
        rest = {name: x for name, x in given.items() if name not in arrays}
        call = lambda arrays: dot_product_attention(**arrays, **rest)  # noqa: E731
        if self.compiled:
            call = jax.jit(call)
        output = call(arrays)
        raise Wrong(f"{self.name} was taken: output {output.dtype}{output.shape}")


def draw(rng: np.random.Generator) -> Spoiled:
    """Return a call that has to be refused."""
    name, change = CHANGES[rng.integers(len(CHANGES))]
    backends = tuple(map(str, rng.choice(BACKENDS, size=2, replace=False)))
    return Spoiled(name, change, bool(rng.random() < 0.3), backends)
