"""The call of attention that all replacements and adapters make."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from flax_attn.attention import attend as attend_here
from flax_attn.everywhere import reports
from flax_attn.everywhere.dispatch import PLACE
from flax_attn.everywhere.target import LeftAlone
from flax_attn.functional.cache_base import Cache
from flax_attn.functional.dropout import KeyedDropout
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.mask_part import of_rank_4
from flax_attn.functional.masks import Mask, as_mask
from flax_attn.functional.outputs import Outputs
from flax_attn.functional.shapes import Index
from flax_attn.sharding.explain import explain


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SharedDropout(KeyedDropout):
    """Dropout that drops the same weights in all rows of the batch and all heads."""

    def indices(self, *parts: Index) -> tuple[Index, ...]:
        b, n, t, s = parts
        return jnp.zeros_like(b), jnp.zeros_like(n), t, s


@contextmanager
def refusals() -> Iterator[None]:
    """Leave a call alone where this library, or `jnp.asarray`, refuses an argument."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise LeftAlone(str(error)) from error


def arguments(original: Callable, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by their names in the original, which refuses wrong ones."""
    with refusals():
        return inspect.signature(original).bind(*args, **kwargs).arguments


def attend(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Mask | Array | None = None,
    *,
    asked: str = "",
    return_weights: bool = False,
    **options: Any,
) -> Outputs[Cache]:
    """Return `flax_attn.attend` of a call, and count it.

    Other libraries hide keys by a large negative score, so that a row that sees no key gives the
    mean of all values, and weights of `1 / s`: so it is here, with their gradients.

    Args:
        query: query, as for `flax_attn.attend`, whose other arguments are those that are not named
            here.
        key: key.
        value: value.
        bias: bias.
        mask: mask.
        asked: what the call is, in a few words, for the report.
        return_weights: whether to return the weights, after dropout.
        **options: options of `flax_attn.attend`.

    Raises:
        LeftAlone: if this library refuses the call, before any work.
    """
    with refusals():
        mask = as_mask(mask)
        found = explain(query, key, value, bias, mask, **options)
    options["return_weights"] = return_weights
    outputs = attend_here(query, key, value, bias, mask, **options)
    shape = f"q{list(query.shape)} k{list(key.shape)} {query.dtype}"
    memory = found.memory
    entry = reports.Entry(
        reports.user_place(),
        PLACE.get(),
        f"{shape}, {asked}" if asked else shape,
        found.backend,
        memory["reference"],
        memory[found.backend or "reference"],
    )
    reports.add(entry)
    return _with_means(outputs, query, value, mask)


def _with_means(outputs: Outputs, query: Array, value: Array, mask: Mask) -> Outputs:
    *batch, t, n, _ = query.shape
    s = value.shape[-3]
    b = batch[0] if batch else 1
    empty = empty_rows(mask, b, n, t, s)
    if empty is None:
        return outputs
    mean = value.mean(axis=-3, keepdims=True, dtype=accumulation_dtype(value.dtype))
    heads = jnp.repeat(mean.astype(value.dtype), n // value.shape[-2], axis=-2)
    rows = empty.swapaxes(1, 2)  # (b, t, n, 1)
    weights = outputs.weights
    if not batch:
        empty, rows = empty[0], rows[0]
    if weights is not None:
        weights = jnp.where(empty, jnp.asarray(1 / s, weights.dtype), weights)
    return Outputs(jnp.where(rows, heads, outputs.output), weights)


def empty_rows(mask: Mask, b: int, n: int, t: int, s: int) -> Bool[Array, "#b #n t 1"] | None:
    """Return which rows see no key, or None where it is known that each row sees one."""
    mask = mask.resolve(b, n, t, s)
    (low, high), rest = mask.split_band()
    if not rest.parts:
        starts = [max(0, i + low) if low is not None else 0 for i in (0, t - 1)]
        stops = [min(s - 1, i + high) if high is not None else s - 1 for i in (0, t - 1)]
        # Both ends go one way: where neither end of the rows is empty no row between them is.
        ends = zip(starts, stops, strict=True)
        if all(start <= stop for start, stop in ends):
            return None
    (start, stop), rest = mask.split_intervals(t, s)
    if not rest.parts:
        return (start >= stop)[:, None, :, None]
    visible = mask.block(jnp.arange(t), jnp.arange(s))
    return ~of_rank_4(visible).any(axis=-1, keepdims=True)
