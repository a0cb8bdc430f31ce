"""Causal masks, windows and lengths for kernels that need no mask array over `(t, s)`."""

from collections.abc import Callable
from functools import partial, reduce
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.backends.call import Call
from flax_attn.backends.containment import on_test
from flax_attn.functional.mask_parts import Lengths


class Band(NamedTuple):
    """The keys that each query sees, as a band; None is unbounded.

    Query `i` sees key `j` when `i - left <= j <= i + right`, `i < query` and `j < key`.
    """

    left: int | None
    right: int | None
    query: Array  # (b,): how many queries, from the first, see anything
    key: Array  # (b,)


def is_band(call: Call) -> bool:
    """Return whether there is no bias and the mask is a `Band` with the query's own position."""
    (low, high), rest = call.mask.split_band()
    inside = (low is None or low <= 0) and (high is None or high >= 0)
    return call.bias is None and inside and all(isinstance(part, Lengths) for part in rest.parts)


def sides(call: Call) -> tuple[int | None, int | None]:
    """Return how many keys a query sees to its left and right; None where that hides nothing."""
    _, _, t, s = call.shape
    (low, high), _ = call.mask.split_band()
    return (
        None if low is None or -low >= t - 1 else -low,
        None if high is None or high >= s - 1 else high,
    )


def has_lengths(call: Call) -> bool:
    """Return whether the mask hides padding."""
    return any(isinstance(part, Lengths) for part in call.mask.parts)


def attend_band(call: Call, kernel: Callable[[Call, Band, Array, Array, Array], Array]) -> Array:
    """Return `kernel(call, band, query, key, value)` under the contract, with no `(t, s)` array.

    The kernel gets at least one query and one key a row; its output for padding is zeroed.
    """
    return on_test(call, partial(_attend, kernel))


def _attend(kernel: Callable[[Call, Band, Array, Array, Array], Array], call: Call) -> Array:
    band = _band(call)
    real = Band(band.left, band.right, jnp.maximum(band.query, 1), jnp.maximum(band.key, 1))
    output = kernel(call, real, call.query, call.key, call.value)
    if not has_lengths(call):
        return output
    sees = jnp.arange(call.shape[2], dtype=jnp.int32)[None] < band.query[:, None]
    return jnp.where(sees[..., None, None], output, 0)


def _band(call: Call) -> Band:
    _, _, t, s = call.shape
    (left, right), query, key = sides(call), _length(call, "query", t), _length(call, "key", s)
    # A window that ends left of the first padded key leaves later queries with nothing to see.
    query = query if left is None else jnp.minimum(query, key + left)
    return Band(left, right, jnp.where(key > 0, query, 0), key)


def _length(call: Call, name: str, size: int) -> Array:
    given = (getattr(part, name) for part in call.mask.parts if isinstance(part, Lengths))
    whole = jnp.full(call.query.shape[0], size, jnp.int32)
    rows = (jnp.asarray(length, jnp.int32).reshape(-1) for length in given if length is not None)
    return jnp.maximum(reduce(jnp.minimum, rows, whole), 0)
