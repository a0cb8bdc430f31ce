"""Forward and backward over the tiles of one head."""

from __future__ import annotations

from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from flax_attn.backends.blocked.slices import add
from flax_attn.backends.blocked.tiles import (
    Head,
    Static,
    Tile,
    dropout_factors,
    edges,
    keys,
    over_chunks,
    padded_start,
    scores,
    starts,
)
from flax_attn.backends.softmax import Softmax, Sums


class Gradients(NamedTuple):
    """The gradients of one head.

    They are those of the scaled query, the key, the value, the bias (`(t, s)`, either being 1 where
    it broadcasts), the sink, and the arrays that a function of scores captures.
    """

    query: Float[Array, "t h"]
    key: Float[Array, "s h"]
    value: Float[Array, "s v"]
    bias: Array | None
    sink: Array | None
    captured: tuple[Array, ...]


def forward(static: Static, head: Head) -> Softmax:
    """Return the output of one head, divided by its sum, and the softmax's maximum and sum."""
    size = static.tiling.block

    def block(start):
        query = lax.dynamic_slice_in_dim(head.query, start, size)

        def step(done, tile):
            return done & _forward_tile(static, head, query, tile)

        parts = [
            reduce(Sums.__and__, [_forward_tile(static, head, query[rows], tile) for tile in tiles])
            for rows, tiles in edges(static, head, start)
        ]
        done = (
            jax.tree.map(lambda *rows: jnp.concatenate(rows), *parts)
            if parts
            else _nothing(static, head)
        )
        return _finish(static, over_chunks(static, head, start, step, done), head.sink)

    blocks = lax.map(block, starts(static.tiling))
    return jax.tree.map(partial(_rows, static), blocks)


def _rows(static: Static, blocks: Array) -> Array:
    return blocks.reshape(-1, blocks.shape[-1])[: static.tiling.t]


def _nothing(static: Static, head: Head) -> Sums:
    rows, dtype = static.tiling.block, static.sums
    output = jnp.zeros((rows, head.value.shape[1]), dtype)
    return Sums(output, jnp.full((rows, 1), static.lowest, dtype), jnp.zeros((rows, 1), dtype))


def _forward_tile(static: Static, head: Head, query: Array, tile: Tile) -> Sums:
    masked, _ = scores(static, head, query, tile)
    top = jnp.maximum(masked.max(axis=-1, keepdims=True), static.lowest)
    exps = jnp.exp(masked - top)
    total = exps.sum(axis=-1, keepdims=True)
    factors = dropout_factors(static, head, tile)
    exps = exps if factors is None else exps * factors
    return Sums(static.dot(exps, keys(static, head.value, tile)), top, total)


def _finish(static: Static, done: Sums, sink: Array | None) -> Softmax:
    if sink is not None:  # a key that every row sees, with a value of zero
        one = jnp.ones((1, 1), static.sums)
        done = done & Sums(0 * one, _as_column(static, sink), one)
    return done.divided()


def _as_column(static: Static, sink: Array) -> Array:
    return sink.astype(static.sums).reshape(1, 1)


def backward(
    static: Static, head: Head, saved: Softmax, cotangent: Float[Array, "t v"]
) -> Gradients:
    """Return the gradients of one head."""
    tiling = static.tiling
    all_rows, delta = _prepare(static, head, saved, cotangent)

    def block(sums, start):
        block_rows = all_rows.block(start, tiling.block)

        def step(carry, tile):
            d_query, sums = _backward_tile(static, head, block_rows, tile, carry[1])
            return carry[0] + d_query, sums

        parts = []
        for rows, tiles in edges(static, head, start):
            d_rows = []
            for tile in tiles:
                d_query, sums = _backward_tile(static, head, block_rows.part(rows), tile, sums)
                d_rows.append(d_query)
            parts.append(sum(d_rows))
        d_query = (
            jnp.concatenate(parts) if parts else jnp.zeros(block_rows.query.shape, static.sums)
        )
        d_query, sums = over_chunks(static, head, start, step, (d_query, sums))
        return sums, d_query

    bias = None if head.bias is None else jnp.zeros(head.bias.shape[2:], static.sums)
    captured = (
        ()
        if head.score is None
        else tuple(jnp.zeros(x.shape, static.sums) for x in head.score.floats)
    )
    sums = (
        jnp.zeros(head.key.shape[::-1], static.sums),
        jnp.zeros(head.value.shape[::-1], static.sums),
        bias,
        captured,
    )
    (d_key, d_value, d_bias, d_captured), d_query = lax.scan(block, sums, starts(tiling))
    real = slice(tiling.pad_before, tiling.pad_before + tiling.s)
    d_sink = (
        None
        if head.sink is None
        else -(jnp.exp(_as_column(static, head.sink) - saved.top) * delta).sum()
    )
    return Gradients(
        _rows(static, d_query), d_key[:, real].T, d_value[:, real].T, d_bias, d_sink, d_captured
    )


class _Rows(NamedTuple):
    # What the backward pass reads of some queries. Transposed copies, because a product with the
    # transpose of a tile of scores takes three times as long on CPU as one with the transpose of a
    # query.
    query: Array
    cotangent: Array
    delta: Array
    top: Array
    query_t: Array
    cotangent_t: Array

    def block(self, start: Array, size: int) -> _Rows:
        return _Rows(
            *(lax.dynamic_slice_in_dim(x, start, size, i // 4) for i, x in enumerate(self))
        )

    def part(self, at: slice) -> _Rows:
        return _Rows(*(x[:, at] if i // 4 else x[at] for i, x in enumerate(self)))


def _prepare(static: Static, head: Head, saved: Softmax, cotangent: Array) -> tuple[_Rows, Array]:
    # The sum is divided out here, so that no tile has to: with e = exp(x - top), dv = e^T do, dx =
    # e (do v^T - delta).
    share = jnp.where(saved.total == 0, 0, 1 / jnp.where(saved.total == 0, 1, saved.total))
    cotangent = cotangent.astype(static.sums) * share
    delta = (saved.output * cotangent).sum(axis=-1, keepdims=True)
    pad = ((0, head.query.shape[0] - static.tiling.t), (0, 0))
    padded = jnp.pad(cotangent.astype(static.operand), pad)
    top = jnp.pad(
        saved.top, pad, constant_values=jnp.inf
    )  # these rows see nothing, whatever a function of scores says
    return _Rows(head.query, padded, jnp.pad(delta, pad), top, head.query.T, padded.T), delta


def _backward_tile(
    static: Static, head: Head, rows: _Rows, tile: Tile, sums: tuple
) -> tuple[Array, tuple]:
    d_key, d_value, d_bias, d_captured = sums
    masked, capped = scores(static, head, rows.query, tile)
    exps = jnp.exp(masked - rows.top)
    d_exps = static.dot(rows.cotangent, keys(static, head.value, tile).T)
    factors = dropout_factors(static, head, tile)
    dropped, d_exps = (exps, d_exps) if factors is None else (exps * factors, d_exps * factors)
    d_scores = exps * (d_exps - rows.delta)
    if head.score is not None:
        # Zeros where nothing is seen, for what overflowed: captured arrays sum over all pairs of
        # tokens.
        seen = exps != 0
        cleared = (jnp.where(seen, x, 0) for x in (capped, d_scores))
        d_scores, found = head.score.pull(tile.indices, *cleared)
        d_captured = tuple(
            sum_ + d.astype(sum_.dtype) for sum_, d in zip(d_captured, found, strict=True)
        )
    if static.soft_cap is not None:
        d_scores = d_scores * (1 - (capped / static.soft_cap) ** 2)
    d_scores = jnp.where(exps == 0, 0, d_scores)  # what overflowed where nothing is seen
    row, col = padded_start(static, tile)
    d_key = add(d_key, static.dot(rows.query_t, d_scores), (0, col))
    d_value = add(d_value, static.dot(rows.cotangent_t, dropped), (0, col))
    if d_bias is not None:
        broadcast = tuple(axis for axis in (0, 1) if d_bias.shape[axis] == 1)
        at = [0 if axis in broadcast else index for axis, index in enumerate((row, col))]
        d_bias = add(d_bias, d_scores.sum(axis=broadcast, keepdims=True), at)
    return static.dot(d_scores, keys(static, head.key, tile)), (d_key, d_value, d_bias, d_captured)
