"""One attention call after all checks: what a backend gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attn_spec.attention_checks import (
    check_argument,
    check_bias,
    check_holds_numbers,
    check_inputs,
    check_scale,
    check_sinks,
    check_soft_cap,
)
from attn_spec.checks import check_type
from flax_attn.backends.platform import platform_of
from flax_attn.functional.abstract import check_has_values
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
        ...     print(str(refusal)[:44])
        backend 'splash' does not support this call:
    """


class Floats(NamedTuple):
    """The arrays of a call that have gradients, or these gradients; None for missing arrays."""

    query: Array
    key: Array
    value: Array
    bias: Array | None = None
    sinks: Array | None = None
    scale: Array | None = None
    captured: tuple[Array, ...] = ()  # by a function of scores


_STATIC = {"static": True}  # known before tracing


@dataclass(frozen=True)
class Call:
    """The arguments of one call of `dot_product_attention`, after all checks: a pytree.

    `jax.jit`, `jax.custom_vjp` and `jax.shard_map` take a call whole. Its arrays are traced; soft
    cap, precision, platform and a scale that is a Python number stay known.

    Args:
        query: query `(b, t, n, h)`.
        key: key `(b, s, k, h)`, k dividing n.
        value: value `(b, s, k, v)`.
        bias: None, or a bias of rank 4, broadcasting to `(b, n, t, s)`; `-inf` hides. In a shard
            it is over all keys.
        mask: mask for these sizes, with its offsets filled in.
        scale: factor on the scores, a Python number or a scalar in the dtype of the scores.
        soft_cap: soft cap on the scores, positive, or None.
        sinks: sinks `(n,)`, or None.
        dropout: None or a rate and a key.
        precision: precision of the matrix products.
        platform: platform that the call runs on, `"cpu"`, `"gpu"` or `"tpu"`.
        score: function of scores, traced, or None.

    Attributes:
        axes: names for the axes of each array, by which a mesh splits them: `"batch"`, `"heads"`,
            `"queries"`, `"keys"`, or None for an axis that is not split. Aligned at the last axis;
            an axis of size one serves every index.
    """

    query: Query
    key: Key
    value: Value
    bias: Float[Array, "#b #n #t _"] | None
    mask: Mask
    scale: Any
    soft_cap: float | None = field(metadata=_STATIC)
    sinks: Float[Array, " n"] | None
    dropout: KeyedDropout | None
    precision: jax.lax.PrecisionLike = field(metadata=_STATIC)
    platform: str = field(metadata=_STATIC)
    score: TracedScore | None = None

    axes: ClassVar[dict[str, tuple[str | None, ...]]] = {
        "query": ("batch", "queries", "heads", None),
        "key": ("batch", "keys", "heads", None),
        "value": ("batch", "keys", "heads", None),
        "bias": ("batch", "heads", "queries", None),
        "sinks": ("heads",),
    }

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The sizes `(b, n, t, s)` of the weights."""
        b, t, n, _ = self.query.shape
        return b, n, t, self.key.shape[1]

    @property
    def options(self) -> dict[str, Any]:
        """The options that are given, by name: what a backend has to support or to refuse."""
        found = {name: getattr(self, name) for name in OPTIONS if name != ARRAY_SCALE}
        if not isinstance(self.scale, Real):
            found[ARRAY_SCALE] = self.scale
        return {name: value for name, value in found.items() if value is not None}

    @property
    def floats(self) -> Floats:
        """The arrays that have gradients; a scale that is a number is one of them."""
        scale = jnp.asarray(self.scale, accumulation_dtype(self.query.dtype))
        captured = () if self.score is None else self.score.floats
        return Floats(self.query, self.key, self.value, self.bias, self.sinks, scale, captured)

    def without_nonfinite_sinks(self) -> Call:
        """Return the call with NaN as the queries of heads whose sink is NaN or infinity."""
        if self.sinks is None:
            return self
        query, sinks = without_nonfinite_sinks(self.query, self.sinks)
        return replace(self, query=query, sinks=sinks)

    def cotangent(self, gradients: Floats) -> Call:
        """Return gradients as a call, in the dtypes of its arrays; None where there is none."""
        gradients = jax.tree.map(_cast, gradients, self.floats, is_leaf=lambda x: x is None)
        found = gradients._asdict()
        found["score"] = None if self.score is None else self.score.cotangent(gradients.captured)
        found["scale"] = None if isinstance(self.scale, Real) else gradients.scale
        _, known = _flatten(self)
        return _unflatten(known, [found.get(name) for name in _ARRAYS])


# Every call has these, and every backend takes them; all others are options.
_IN_EVERY_CALL = {"query", "key", "value", "mask", "scale", "platform"}
ARRAY_SCALE = "array scale"
OPTIONS = *(one.name for one in fields(Call) if one.name not in _IN_EVERY_CALL), ARRAY_SCALE
_ARRAYS = tuple(one.name for one in fields(Call) if not one.metadata)
_OPTIONS = tuple(one.name for one in fields(Call) if one.metadata)


def _cast(gradient: Array | None, x: Array | None) -> Array | None:
    return None if gradient is None or x is None else gradient.astype(x.dtype)


def _flatten(call: Call) -> tuple[list, tuple]:
    scale = call.scale if isinstance(call.scale, Real) else None
    arrays = {name: getattr(call, name) for name in _ARRAYS}
    if scale is not None:
        arrays["scale"] = None
    options = tuple(getattr(call, name) for name in _OPTIONS)
    return list(arrays.values()), (scale, options)


def _flatten_with_keys(call: Call) -> tuple[list, tuple]:
    arrays, known = _flatten(call)
    keys = map(jax.tree_util.GetAttrKey, _ARRAYS)
    return list(zip(keys, arrays, strict=True)), known


def _unflatten(known: tuple, arrays: Any) -> Call:
    scale, options = known
    # JAX's transforms put other objects in the place of arrays: nothing is checked again.
    call = object.__new__(Call)
    vars(call).update(zip((*_ARRAYS, *_OPTIONS), (*arrays, *options), strict=True))
    if scale is not None:
        vars(call)["scale"] = scale
    return call


jax.tree_util.register_pytree_with_keys(Call, _flatten_with_keys, _unflatten, _flatten)


def prepare(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Mask | Array | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    score: Callable | ScoreFunction | None = None,
    sinks: Array | None = None,
    dropout: KeyedDropout | None = None,
    precision: jax.lax.PrecisionLike = None,
    platform: str | None = None,
) -> Call:
    """Return the arguments of `dot_product_attention` as a call, or raise `ValueError`."""
    query, key, value = _tokens(query=query, key=key, value=value)
    check_type("is_causal", is_causal, bool, "True or False")
    check_soft_cap(soft_cap)
    check_precision(precision)
    check_type("dropout", dropout, KeyedDropout | None, "dropout=KeyedDropout(0.1, key)")
    platform = platform_of(query) if platform is None else platform
    if query.ndim == 3:
        query, key, value = query[None], key[None], value[None]
    b, t, n, h = query.shape
    shape = b, n, t, key.shape[1]
    dtype = accumulation_dtype(query.dtype)
    bias = None if bias is None else _as_bias(bias, shape)
    scale = h**-0.5 if scale is None else _as_scale(scale, dtype)
    mask = as_mask(mask) & Mask.causal() if is_causal else as_mask(mask)
    check_has_values("mask", mask)
    return Call(
        query=query,
        key=key,
        value=value,
        bias=bias,
        mask=mask.resolve(*shape),
        scale=scale,
        soft_cap=None if soft_cap is None else float(soft_cap),
        score=_traced(score, shape, dtype),
        sinks=None if sinks is None else _as_sinks(sinks, n),
        dropout=None if dropout is None or dropout.rate == 0 else dropout,
        precision=precision,
        platform=platform,
    )


def _tokens(**given: Any) -> tuple[Array, Array, Array]:
    query, key, value = (as_argument(name, x) for name, x in given.items())
    shapes = query.shape, key.shape, value.shape
    _check_known(*shapes)
    check_inputs(*shapes, (query.dtype.name, key.dtype.name, value.dtype.name))
    return query, key, value


def _as_bias(bias: Any, shape: tuple[int, int, int, int]) -> Array:
    bias = as_argument("bias", bias)
    check_bias(bias.shape, bias.dtype.name, shape)
    return bias.reshape((1,) * (4 - bias.ndim) + bias.shape)


def _as_sinks(sinks: Any, n: int) -> Array:
    sinks = as_argument("sinks", sinks)
    check_sinks(n, sinks.shape, sinks.dtype.name)
    return sinks


def as_argument(name: str, value: Any) -> Array:
    """Return an array of JAX or NumPy, or a variable of a module, as an array of JAX, or raise."""
    if not isinstance(value, jax.Array) and hasattr(value, "__jax_array__"):
        value = jnp.asarray(value)
    check_argument(name, value, jax.Array | np.ndarray, f"Pass jnp.asarray({name})")
    check_holds_numbers(name, _holds_numbers(value.dtype), value.dtype)
    return jnp.asarray(value)


def _holds_numbers(dtype: np.dtype) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool))


def _as_scale(scale: Any, dtype: jnp.dtype) -> Any:
    if isinstance(scale, jax.Array) or hasattr(scale, "__jax_array__"):
        scale = jnp.asarray(scale)
        check_scale(scale, scale.shape, scale.dtype.name)
        return scale.astype(dtype)
    return _as_number(scale.item() if _is_number(scale) else scale)


def _is_number(scale: Any) -> bool:
    # One of NumPy, in an array without axes.
    return isinstance(scale, np.ndarray) and not scale.ndim


def _as_number(scale: Any) -> float:
    if isinstance(scale, np.ndarray):
        check_scale(scale, scale.shape, scale.dtype.name)
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


def _check_known(*shapes: tuple[Any, ...]) -> None:
    # jax.export has sizes that are symbols. Which kernel runs, and its blocks, follow from all
    # sizes but the batch.
    if any(not isinstance(size, int) for shape in shapes for size in shape[-3:]):
        raise ValueError(
            "of the sizes of a call the batch alone may be symbolic in jax.export; got query, key"
            f" and value {', '.join(map(str, shapes))}. Export for each number of tokens, or pad to"
            " the longest under lengths"
        )


def _traced(
    score: Callable | ScoreFunction | None, shape: tuple[int, int, int, int], dtype: jnp.dtype
) -> TracedScore | None:
    if score is None:
        return None
    score = score if isinstance(score, ScoreFunction) else ScoreFunction(score)
    return score.trace(shape, dtype)
