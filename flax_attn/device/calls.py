"""Small calls, each with another part of the contract, and numbers for calls of any size."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct

from flax_attn.bench.calls import ModelCall
from flax_attn.functional.dropout import KeyedDropout
from flax_attn.functional.masks import Mask

# No multiple of any tile, and pairwise different.
B, T, S, N, K = 2, 75, 107, 4, 2


def _float(*shape: int) -> ShapeDtypeStruct:
    return ShapeDtypeStruct(shape, jnp.float32)


def _call(
    name: str, mask: Any = None, *, t: int = T, h: int = 64, v: int | None = None, **more: Any
) -> ModelCall:
    """Return a call of 75 queries and 107 keys; of `more`, what holds arrays goes with them."""
    arrays = {
        "query": _float(B, t, N, h),
        "key": _float(B, S, K, h),
        "value": _float(B, S, K, v or h),
        **more,
    }
    if mask is not None:
        arrays["mask"] = mask
    # A number and a function are part of the program, and no arrays.
    options = {key: arrays.pop(key) for key in ("soft_cap", "score") if key in more}
    learned = [key for key in ("query", "key", "value", "bias", "sinks") if key in arrays]
    return ModelCall(name, arrays, options, tuple(learned))


def _lengths() -> Any:
    rows = ShapeDtypeStruct((B,), jnp.int32)
    return jax.eval_shape(lambda rows: Mask.lengths(key=rows), rows)


def _documents() -> Any:
    queries = ShapeDtypeStruct((B, T), jnp.int32)
    keys = ShapeDtypeStruct((B, S), jnp.int32)
    return jax.eval_shape(Mask.segments, queries, keys)


def _softer(score: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    distance = (n + 1) * abs(i - j)
    return score - 0.01 * distance.astype(score.dtype)


_STRIPES = np.random.default_rng(3).random((N, T, S)) < 0.4
_DROPOUT = KeyedDropout(0.3, ShapeDtypeStruct((2,), jnp.uint32))
FROM_THE_END = S - T
# It stands in the last value of the second row, which a causal mask shows to the last query only.
NAN = "NaN to come"

CALLS = (
    _call("no mask"),
    _call("causal", Mask.causal(FROM_THE_END)),
    _call("causal, rows that see nothing", Mask.causal(-9)),
    _call("window", Mask.window(20, 3, FROM_THE_END)),
    _call("lengths", _lengths()),
    _call("packed documents", _documents()),
    _call("prefix", Mask.prefix(19, offset=FROM_THE_END)),
    _call("array of booleans", Mask.dense(_STRIPES)),
    _call("function of indices", Mask.where(lambda b, n, i, j: (i + 2 * j) % 5 > n)),
    _call("bias", Mask.causal(FROM_THE_END), bias=_float(1, N, T, S)),
    _call("bias of keys", bias=_float(B, 1, 1, S)),
    _call("soft cap", Mask.causal(FROM_THE_END), soft_cap=2.0),
    _call("sinks", Mask.sliding_window(30, FROM_THE_END), sinks=_float(N)),
    _call("function of scores", Mask.causal(FROM_THE_END), score=_softer),
    _call("dropout", Mask.causal(FROM_THE_END), dropout=_DROPOUT),
    _call("widths 192 and 128", Mask.causal(FROM_THE_END), h=192, v=128),
    _call("width 256", Mask.causal(FROM_THE_END), h=256),
    _call("one query", Mask.causal(S - 1), t=1),
    _call(NAN, Mask.causal(FROM_THE_END)),
)


def in_dtype(call: ModelCall, dtype: str) -> ModelCall:
    """Return a call whose floats have a dtype."""

    def cast(x: Any) -> Any:
        floating = _is_open(x) and jnp.issubdtype(x.dtype, jnp.floating)
        return ShapeDtypeStruct(x.shape, jnp.dtype(dtype)) if floating else x

    return replace(call, arrays=jax.tree.map(cast, call.arrays))


def drawn(call: ModelCall, seed: int = 0) -> tuple[dict[str, Any], np.ndarray]:
    """Return numbers for the arrays of a call, and for its cotangent.

    Integers of one axis are lengths, and of two the documents of tokens.
    """
    random = np.random.default_rng(seed)
    draw = partial(_drawn, random, call.arrays["key"].shape[1])
    arrays = jax.tree.map(lambda x: draw(x) if _is_open(x) else x, call.arrays)
    if call.name == NAN:
        arrays["value"][1, -1, 0, 3] = np.nan
    return arrays, draw(call.cotangent)


def _is_open(x: Any) -> bool:
    # Else it is known already, as an array of booleans is.
    return isinstance(x, ShapeDtypeStruct)


def _drawn(random: np.random.Generator, keys: int, x: ShapeDtypeStruct) -> np.ndarray:
    if x.dtype == jnp.int32:
        return _integers(x.shape, keys)
    # The key of dropout.
    if x.dtype == jnp.uint32:
        return random.integers(0, 2**32, x.shape, np.uint32)
    return random.standard_normal(x.shape, np.float32).astype(x.dtype)


def _integers(shape: tuple[int, ...], keys: int) -> np.ndarray:
    # Lengths: all keys but one, and less in each row that follows.
    if len(shape) == 1:
        shorter = np.arange(shape[0]) * keys // (2 * shape[0])
        return (keys - 1 - shorter).astype(np.int32)
    # Five documents, as long as one another.
    documents = np.arange(shape[1]) * 5 // shape[1]
    return np.broadcast_to(documents, shape).astype(np.int32)
