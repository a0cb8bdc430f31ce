"""Calls with one argument that no backend may take: each has to refuse it, in our own words."""

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
CALLS = """
dtype=float8_e4m3fn
dtype=float8_e5m2
dtype=float8_e4m3b11fnuz
dtype=float8_e4m3
dtype=float8_e3m4
dtype=float8_e8m0fnu
dtype=float4_e2m1fn
dtype=int32
dtype=uint8
dtype=bool
dtype=complex64
query=None
query=1.0
query=[[1.0]]
query='query'
query=Mask.causal()
query=ones(T)
query=ones(B, T, N)
query=ones(1, B, T, N, H)
query=ones(B, T, N, H + 1)
query=ones(B, T, 0, H)
query=ones(B + 1, T, N, H)
query=ones(B, T, 3, H)
key=None
key=[1.0]
key=ones(B, 0, K, H)
key=ones(B, S + 1, K, H)
key=ones(S, K, H)
value=None
value=[1.0]
value=ones(B, S, K, 0)
value=ones(B, S, K + 1, H)
value=ones(B, S, K, H).astype(int)
bias=Mask.causal()
bias=[1.0]
bias=1.0
bias='bias'
bias=ones(T, S).astype(bool)
bias=ones(T, S).astype(jnp.int8)
bias=ones(T, S).astype(jnp.complex64)
bias=ones(S, T)
bias=ones(1, B, N, T, S)
bias=ones(B, 3, T, S)
mask='causal'
mask=3
mask=1.5
mask=ones(S, T).astype(bool)
mask=ones(1, 1, 1, T, S).astype(bool)
mask=Mask() & 'mask'
mask=Mask.dense('mask')
mask=Mask.causal()
mask=Mask.causal(1.5)
mask=Mask.causal('1')
mask=Mask.causal(True)
mask=Mask.causal(10**6)
mask=Mask.causal(np.zeros(B + 1, int))
mask=Mask.window(-1, 0, 0)
mask=Mask.window(1.5, 0, 0)
mask=Mask.window(jnp.int32(2), 0, 0)
mask=Mask.sliding_window(0, 0)
mask=Mask.sliding_window(2.0, 0)
mask=Mask.prefix(2)
mask=Mask.prefix(1.5, 0)
mask=Mask.prefix('1', 0)
mask=Mask.prefix(-1, 0)
mask=Mask.lengths(key=1.5)
mask=Mask.lengths(query=-2)
mask=Mask.lengths(key=[-1, 3])
mask=Mask.lengths(key=ones(B))
mask=Mask.lengths(query=[1, 2, 3])
mask=Mask.lengths(key=np.ones((B, 1), int))
mask=Mask.segments(0, 0)
mask=Mask.segments(np.zeros(T, int))
mask=Mask.segments(np.zeros(T), np.zeros(S))
mask=Mask.segments(np.zeros((3, T), int), np.zeros(S, int))
mask=Mask.where(3)
mask=Mask.where(lambda i, j: i > j)
mask=Mask.where(lambda b, n, i, j: i - j)
mask=Mask.where(lambda b, n, i, j: True if i > j else False)
scale=ones(S)
scale=ones(1)
scale=np.ones(S)
scale=1j
scale='1'
scale=[1.0]
scale=True
scale=ones().astype(jnp.complex64)
scale=float('nan')
scale=float('inf')
scale=10**400
scale=Mask.causal()
soft_cap=0
soft_cap=-1.0
soft_cap=float('nan')
soft_cap=float('inf')
soft_cap=1e-40
soft_cap='1'
soft_cap=[1.0]
soft_cap=ones(N)
soft_cap=1j
soft_cap=True
soft_cap=Mask.causal()
score=3
score=lambda score: score
score=lambda score, b, n, i, j: (score, score)
score=lambda score, b, n, i, j: i
score=lambda score, b, n, i, j: None
score=lambda score, b, n, i, j: score if i > j else score + 1
score=lambda score, b, n, i, j: jnp.stack([score, score])
sinks=0.0
sinks=[0.0] * N
sinks='sinks'
sinks=ones()
sinks=ones(N + 1)
sinks=ones(1, N)
sinks=ones(N).astype(int)
sinks=ones(N).astype(bool)
sinks=Mask.causal()
dropout=0.1
dropout='0.1'
dropout=jax.random.key(0)
dropout=KeyedDropout(1.0, np.zeros(2, np.uint32))
dropout=KeyedDropout('0.5', np.zeros(2, np.uint32))
dropout=KeyedDropout(0.5, 3)
dropout=KeyedDropout(0.5, np.zeros((2, 2), np.uint32))
dropout=KeyedDropout(0.5, np.zeros(2))
precision='nonsense'
precision=3
precision=[1.0, 2.0]
backend='nonsense'
backend=None
backend=3
backend=['native']
""".strip().splitlines()
NAMES = {
    **{"jax": jax, "jnp": jnp, "np": np, "Mask": Mask, "KeyedDropout": KeyedDropout},
    **{"ones": lambda *shape: jnp.ones(shape), "B": B, "T": T, "S": S, "N": N, "K": K, "H": H},
}


@dataclass(frozen=True)
class Spoiled:
    """One call that has to be refused for one argument, as it is spelled."""

    argument: str
    compiled: bool
    backends: tuple[str, ...]
    wrong: bool = True
    refusable: bool = True

    def __str__(self) -> str:
        how = ", compiled" if self.compiled else ""
        return f"dot_product_attention(..., {self.argument}){how}, on {', '.join(self.backends)}"

    def check(self, backend: str) -> None:
        """Make the call, which has to raise."""
        given = {**_inputs(), "mask": None, "backend": backend, **self._change()}
        arrays = {name: x for name, x in given.items() if isinstance(x, jax.Array)}
        rest = {name: x for name, x in given.items() if name not in arrays}

        def call(arrays):
            return dot_product_attention(**arrays, **rest)

        output = jax.jit(call)(arrays) if self.compiled else call(arrays)
        raise Wrong(f"taken: the output is {output.dtype}{list(output.shape)}")

    def _change(self) -> dict[str, Any]:
        name, _, value = self.argument.partition("=")
        if name != "dtype":
            return {name: eval(value, dict(NAMES))}
        dtype = getattr(ml_dtypes, value, None) or np.dtype(value)
        return {name: x.astype(dtype) for name, x in _inputs().items()}


def _inputs() -> dict[str, jax.Array]:
    shapes = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, H)}
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()
    }


def draw(rng: np.random.Generator) -> Spoiled:
    """Return a call that has to be refused."""
    argument = CALLS[rng.integers(len(CALLS))]
    backends = tuple(map(str, rng.choice(BACKENDS, size=2, replace=False)))
    return Spoiled(argument, bool(rng.random() < 0.3), backends)
