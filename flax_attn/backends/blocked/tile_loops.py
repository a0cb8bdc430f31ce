"""Loops over the tiles of a division, and how what is found in them becomes one array."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float

from flax_attn.backends.blocked.spans import Division, Span
from flax_attn.backends.blocked.wide_tile import Place
from flax_attn.functional.shapes import Index


def over_spans(
    division: Division, in_span: Callable[[Any, Index | int, Span], tuple], carry: Any
) -> tuple[Any, Any]:
    """Return `carry` after every span, and what was found in them, joined to `(b, t, n, _)`."""
    in_part = partial(_over_part, division.spans, in_span)
    carry, parts = _scan(division, division.parts, in_part, carry)
    return carry, jax.tree.map(partial(_join_parts, division), parts)


def _over_part(spans: Sequence[Span], in_span: Callable, carry: Any, part: Index | int) -> tuple:
    pieces = []
    for span in spans:
        carry, found = in_span(carry, part, span)
        pieces.append(found)
    return carry, jax.tree.map(_joined, *pieces)


def _joined(*pieces: Float[Array, "b k t g w"]) -> Float[Array, "b k t g w"]:
    return jnp.concatenate(pieces, axis=2)


def over_span(
    division: Division,
    step: Callable[[Any, Place], tuple],
    carry: Any,
    part: Index | int,
    span: Span,
) -> tuple[Any, Any]:
    """Return `carry` after the tiles of a span, and what was found in them, `(b, k, t, g, _)`."""
    one = partial(_at_place, step, part, span)
    carry, tiles = _scan(division, span.count, one, carry)
    joined = jax.tree.map(_join_tiles, tiles)
    return carry, joined


def _join_tiles(tiles: Float[Array, "i b k t g w"]) -> Float[Array, "b k t g w"]:
    return rearrange(tiles, "i b k t g w -> b k (i t) g w")


def _at_place(
    step: Callable[[Any, Place], tuple], part: Index | int, span: Span, carry: Any, i: Index | int
) -> tuple[Any, Any]:
    return step(carry, Place(part, span, i))


def _scan(
    division: Division, count: int, step: Callable[[Any, Any], tuple], carry: Any
) -> tuple[Any, Any]:
    # XLA knows how often such a loop runs, so that the host does not wait for it.
    if not division.unrolled and count > 1:
        return lax.scan(step, carry, jnp.arange(count, dtype=jnp.int32))
    return _unrolled(count, step, carry)


def _unrolled(count: int, step: Callable[[Any, Any], tuple], carry: Any) -> tuple[Any, Any]:
    every = []
    for i in range(count):
        carry, found = step(carry, i)
        every.append(found)
    return carry, jax.tree.map(_stacked, *every)


def _stacked(*tiles: Array) -> Array:
    return jnp.stack(tiles)


def _join_parts(division: Division, parts: Float[Array, "i b k t g w"]) -> Array:
    # A part is some rows of the batch whole, or some heads of one row.
    axes = "(p j) b k t g w -> (p b) t (j k g) w"
    return rearrange(parts, axes, j=division.head_parts)
