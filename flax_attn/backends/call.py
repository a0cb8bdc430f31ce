"""One attention call after all checks: what a backend gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from flax_attn.backends.platform import platform_of
from flax_attn.functional.checks import check_bias, check_inputs, check_options, check_type
from flax_attn.functional.dropout import KeyedDropout
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.masks import Mask, as_mask
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
    _check_known(query.shape, key.shape, value.shape)
    check_inputs(query.shape, key.shape, value.shape, (query.dtype.name, key.dtype.name, value.dtype.name))
    check_options(query.shape[-2], None if sinks is None else sinks.shape, soft_cap)
    check_type("dropout", dropout, KeyedDropout | None, "dropout=KeyedDropout(0.1, key)")
    platform = platform_of(query) if platform is None else platform
    if query.ndim == 3:
        query, key, value = query[None], key[None], value[None]
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    if bias is not None:
        check_bias(bias.shape, bias.dtype.name, shape)
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    mask = as_mask(mask).resolve(*shape)
    soft_cap = None if soft_cap is None else float(soft_cap)
    traced = _traced(score, shape, accumulation_dtype(query.dtype))
    return Call(query, key, value, bias, mask, scale, soft_cap, sinks, dropout, precision, platform, traced)


def _check_known(*shapes: tuple[Any, ...]) -> None:
    # jax.export has sizes that are symbols. Which kernel runs, and its blocks, follow from all sizes but the batch.
    if any(not isinstance(size, int) for shape in shapes for size in shape[-3:]):
        raise ValueError(
            "of the sizes of a call the batch alone may be symbolic in jax.export; got query, key and value "
            f"{', '.join(map(str, shapes))}. Export for each number of tokens, or pad to the longest under lengths"
        )


def _traced(
    score: Callable | ScoreFunction | None, shape: tuple[int, int, int, int], dtype: jnp.dtype
) -> TracedScore | None:
    if score is None:
        return None
    score = score if isinstance(score, ScoreFunction) else ScoreFunction(score)
    return score.trace(shape, dtype)
