"""Causal masks, windows and lengths for kernels that need no mask array over `(t, s)`."""

from collections.abc import Callable
from functools import partial
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
    left = None if low is None or -low >= t - 1 else -low
    return left, None if high is None or high >= s - 1 else high


def has_lengths(call: Call) -> bool:
    """Return whether the mask hides padding."""
    return any(isinstance(part, Lengths) for part in call.mask.parts)


def attend_band(call: Call, kernel: Callable[[Call, Band, Array, Array, Array], Array]) -> Array:
    """Return `kernel(call, band, query, key, value)` under the contract, with no `(t, s)` array.

    The kernel gets at least one query and one key a row; its output for padding is zeroed.
    """
    return on_test(call, partial(_attend, kernel))


def _attend(kernel: Callable[[Call, Band, Array, Array, Array], Array], call: Call) -> Array:
    left, right = sides(call)
    query, key = _seeing(call, left), _shortest(call, "key")
    band = Band(left, right, jnp.maximum(query, 1), jnp.maximum(key, 1))
    output = kernel(call, band, call.query, call.key, call.value)
    return _first_rows(output, query) if has_lengths(call) else output


def _first_rows(output: Array, count: Array) -> Array:
    # Zeros for the queries of each row behind so many.
    index = jnp.arange(output.shape[1], dtype=jnp.int32)
    sees = index[None] < count[:, None]
    return jnp.where(sees[..., None, None], output, 0)


def _seeing(call: Call, left: int | None) -> Array:
    """Return how many queries of each row, from the first, see a key."""
    query, key = _shortest(call, "query"), _shortest(call, "key")
    # A window that ends left of the first padded key leaves later queries with nothing to see.
    query = query if left is None else jnp.minimum(query, key + left)
    return jnp.where(key > 0, query, 0)


def _shortest(call: Call, name: str) -> Array:
    """Return how many queries or keys of each row all lengths let through."""
    length = jnp.full(call.query.shape[0], getattr(call, name).shape[1], jnp.int32)
    for part in call.mask.parts:
        given = getattr(part, name) if isinstance(part, Lengths) else None
        if given is not None:
            length = jnp.minimum(length, jnp.asarray(given, jnp.int32).reshape(-1))
    return jnp.maximum(length, 0)
