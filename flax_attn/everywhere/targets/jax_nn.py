"""`jax.nn.dot_product_attention`."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.everywhere.core import attend, refusals
from flax_attn.everywhere.target import LeftAlone, Place, Target
from flax_attn.everywhere.words import asked_for
from flax_attn.functional.masks import Mask


def dot_product_attention(
    original: Callable,
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Array:
    """Return what `jax.nn.dot_product_attention` returns.

    Its softmax is in float32, also for float64; here it is in float64 then.
    """
    if implementation not in (None, "xla"):
        raise LeftAlone(f"implementation={implementation!r} asks for a kernel by name")
    if return_residual:
        raise LeftAlone("return_residual=True asks for the logarithms of the sums")
    with refusals():
        query, key, value = (jnp.asarray(x) for x in (query, key, value))
        if query.ndim not in (3, 4):
            raise LeftAlone(f"a query of rank {query.ndim}")
        if value.shape != key.shape:
            raise ValueError(f"key {key.shape} and value {value.shape} have different shapes")
        b = query.shape[0] if query.ndim == 4 else 1
        given = {"query": query_seq_lengths, "key": key_value_seq_lengths}
        lengths = {name: _lengths(x, b) for name, x in given.items() if x is not None}
        seen = Mask() if mask is None else Mask.dense(_boolean(mask))
        # Both count from the first key also where there are fewer queries than keys.
        if is_causal:
            seen = seen & Mask.causal(0)
        if local_window_size is not None:
            seen = seen & _window(local_window_size)
        if "key" in lengths:
            seen = seen & Mask.lengths(key=lengths["key"])
    words = asked_for(
        query,
        key,
        bias=bias,
        mask=mask,
        causal=is_causal,
        window=local_window_size,
        lengths=lengths,
        scale=scale,
    )
    output = attend(query, key, value, bias, seen, scale=scale, asked=words).output
    if "query" not in lengths:
        return output
    # Padding is zero, where a row that sees no key is a mean.
    rows = jnp.arange(query.shape[-3], dtype=jnp.int32)
    real = rows < lengths["query"][:, None]
    real = real.reshape(*output.shape[:-2], 1, 1)
    return jnp.where(real, output, 0)


def _boolean(mask: Any) -> Array:
    mask = jnp.asarray(mask)
    # A mask of 0 and 1 is one of ours, and none of `jax.nn`.
    if mask.dtype != bool:
        raise ValueError(f"mask must be boolean; got dtype {mask.dtype}")
    return mask


def _lengths(lengths: Any, b: int) -> Array:
    lengths = jnp.asarray(lengths)
    if lengths.shape != (b,) or lengths.dtype != jnp.int32:
        found = f"shape {lengths.shape} and dtype {lengths.dtype}"
        raise ValueError(f"lengths must be int32, one a row of the {b}; got {found}")
    return lengths


def _window(size: int | tuple[int, int]) -> Mask:
    left, right = (size, size) if isinstance(size, int) else size
    return Mask.window(left, right, 0)


TARGET = Target(
    name="jax.nn",
    package="jax",
    versions=">=0.10.2,<0.13",
    places=(
        Place("jax._src.nn.functions", "dot_product_attention", dot_product_attention, "jax.nn"),
    ),
)
