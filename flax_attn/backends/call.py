"""One attention call after all checks: what a backend gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from flax_attn.backends.platform import platform_of
from flax_attn.functional.attention_checks import check_argument, check_scale, check_sinks, check_soft_cap
from flax_attn.functional.checks import check_bias, check_inputs, check_type
from flax_attn.functional.dropout import KeyedDropout
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.masks import Mask, as_mask
from flax_attn.functional.nonfinite import without_nonfinite_sinks
from flax_attn.functional.score_function import ScoreFunction
from flax_attn.functional.shapes import Key, Query, Value
from flax_attn.functional.traced_score import TracedScore


class Unsupported(ValueError):  # noqa: N818 (a refusal, not an error of the library)
    """Raised when a backend that was asked for by name cannot run the call.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax_attn import dot_product_attention
        >>> x = jnp.ones((1, 5, 4, 8))
        >>> try:
        ...     dot_product_attention(x, x, x, backend="splash")
        ... except Unsupported as refusal:
        ...     print(str(refusal)[:41])
        backend 'splash' cannot honour this call:
    """


@dataclass(frozen=True)
class Call:
    """The arguments of one call of `dot_product_attention`, after all checks.

    Args:
        query: `(b, t, n, h)`.
        key: `(b, s, k, h)`, k dividing n.
        value: `(b, s, k, v)`.
        bias: None, or of rank 4 and broadcasting to `(b, n, t, s)`; `-inf` hides.
        mask: for these sizes, with its offsets filled in.
        scale: factor on the scores.
        soft_cap: None or positive.
        sinks: None or `(n,)`.
        dropout: None or a rate and a key.
        precision: of the matrix products.
        platform: `"cpu"`, `"gpu"` or `"tpu"`.
        score: None or a function of scores, traced.
    """

    query: Query
    key: Key
    value: Value
    bias: Float[Array, "#b #n #t #s"] | None
    mask: Mask
    scale: Any
    soft_cap: float | None
    sinks: Float[Array, " n"] | None
    dropout: KeyedDropout | None
    precision: jax.lax.PrecisionLike
    platform: str
    score: TracedScore | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The sizes `(b, n, t, s)` of the weights."""
        b, t, n, _ = self.query.shape
        return b, n, t, self.key.shape[1]


def prepare(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Mask | Array | None = None,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    score: Callable | ScoreFunction | None = None,
    sinks: Array | None = None,
    dropout: KeyedDropout | None = None,
    precision: jax.lax.PrecisionLike = None,
    platform: str | None = None,
) -> Call:
    """Return the arguments of `dot_product_attention` as a call, or raise `ValueError`."""
    query, key, value = (as_argument(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    check_inputs(query.shape, key.shape, value.shape, (query.dtype.name, key.dtype.name, value.dtype.name))
    check_soft_cap(soft_cap)
    check_precision(precision)
    check_type("dropout", dropout, KeyedDropout | None, "dropout=KeyedDropout(0.1, key)")
    platform = platform_of(query) if platform is None else platform
    if query.ndim == 3:
        query, key, value = query[None], key[None], value[None]
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    if bias is not None:
        bias = as_argument("bias", bias)
        check_bias(bias.shape, bias.dtype.name, shape)
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    scale = query.shape[-1] ** -0.5 if scale is None else _as_scale(scale)
    mask = as_mask(mask).resolve(*shape)
    soft_cap = None if soft_cap is None else float(soft_cap)
    traced = _traced(score, shape, accumulation_dtype(query.dtype))
    if sinks is not None:
        sinks = as_argument("sinks", sinks)
        check_sinks(query.shape[2], sinks.shape, sinks.dtype.name)
        query, sinks = without_nonfinite_sinks(query, sinks)
    return Call(query, key, value, bias, mask, scale, soft_cap, sinks, dropout, precision, platform, traced)


def as_argument(name: str, value: Any) -> Array:
    """Return an array of JAX or NumPy, or a variable of a module, as an array of JAX, or raise."""
    if not isinstance(value, jax.Array) and hasattr(value, "__jax_array__"):
        value = jnp.asarray(value)
    check_argument(name, value, jax.Array | np.ndarray, f"Pass jnp.asarray({name})")
    return jnp.asarray(value)


def _as_scale(scale: Any) -> Any:
    if isinstance(scale, jax.Array) or hasattr(scale, "__jax_array__"):
        scale = jnp.asarray(scale)
        check_scale(scale, scale.shape, scale.dtype.name)
        return scale
    if isinstance(scale, np.ndarray) and scale.ndim:
        check_scale(scale, scale.shape, scale.dtype.name)
    scale = scale.item() if isinstance(scale, np.ndarray) else scale
    check_scale(scale, None, "")
    return float(scale)


def check_precision(precision: Any) -> None:
    """Raise unless `jax.lax.dot_general` takes this precision."""
    if precision is None:
        return
    try:
        _dot_with(precision)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"precision must be one that jax.lax.dot_general takes; got {precision!r}. Pass None, "
            '"default", "high", "highest", or a jax.lax.DotAlgorithmPreset'
        ) from error


@cache
def _dot_with(precision: Any) -> Any:
    x = jax.ShapeDtypeStruct((1,), jnp.float32)
    return jax.eval_shape(lambda x: jax.lax.dot(x, x, precision=precision), x)


def _traced(
    score: Callable | ScoreFunction | None, shape: tuple[int, int, int, int], dtype: jnp.dtype
) -> TracedScore | None:
    if score is None:
        return None
    score = score if isinstance(score, ScoreFunction) else ScoreFunction(score)
    return score.trace(shape, dtype)
