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
    Tile,
    dropout_factors,
    edges,
    keys,
    over_chunks,
    padded_start,
    scores,
    starts,
)
from flax_attn.backends.call import Floats
from flax_attn.backends.softmax import Softmax, Sums


def forward(head: Head) -> Softmax:
    """Return the output of one head, divided by its sum, and the softmax's maximum and sum."""
    size = head.tiling.block

    def block(start: Array) -> Softmax:
        query = lax.dynamic_slice_in_dim(head.query, start, size)

        def step(done: Sums, tile: Tile) -> Sums:
            return done & _forward_tile(head, query, tile)

        parts = []
        for rows, tiles in edges(head, start):
            own = [_forward_tile(head, query[rows], tile) for tile in tiles]
            parts.append(reduce(Sums.__and__, own))
        done = _joined(parts) if parts else _nothing(head)
        return _finish(head, over_chunks(head, start, step, done))

    blocks = lax.map(block, starts(head.tiling))
    return jax.tree.map(partial(_rows, head), blocks)


def _joined(parts: list[Sums]) -> Sums:
    return jax.tree.map(lambda *rows: jnp.concatenate(rows), *parts)


def _rows(head: Head, blocks: Array) -> Array:
    return blocks.reshape(-1, blocks.shape[-1])[: head.tiling.t]


def _nothing(head: Head) -> Sums:
    rows, dtype = head.tiling.block, head.sums
    output = jnp.zeros((rows, head.value.shape[1]), dtype)
    return Sums(output, jnp.full((rows, 1), head.lowest, dtype), jnp.zeros((rows, 1), dtype))


def _forward_tile(head: Head, query: Array, tile: Tile) -> Sums:
    masked, _ = scores(head, query, tile)
    top = jnp.maximum(masked.max(axis=-1, keepdims=True), head.lowest)
    exps = jnp.exp(masked - top)
    total = exps.sum(axis=-1, keepdims=True)
    factors = dropout_factors(head, tile)
    exps = exps if factors is None else exps * factors
    return Sums(head.dot(exps, keys(head, head.value, tile)), top, total)


def _finish(head: Head, done: Sums) -> Softmax:
    if head.sink is not None:
        # A key that every row sees, with a value of zero.
        one = jnp.ones((1, 1), head.sums)
        done = done & Sums(0 * one, _as_column(head, head.sink), one)
    return done.divided()


def _as_column(head: Head, sink: Array) -> Array:
    return sink.astype(head.sums).reshape(1, 1)


def backward(head: Head, saved: Softmax, cotangent: Float[Array, "t v"]) -> Floats:
    """Return the gradients of one head, all but that of the scale.

    They are those of the scaled query, the key, the value, the bias (`(t, s)`, either being 1 where
    it broadcasts), the sink, and the arrays that a function of scores captures.
    """
    tiling, dtype = head.tiling, head.sums
    all_rows, delta = _prepare(head, saved, cotangent)

    def block(sums: _KeySums, start: Array) -> tuple[_KeySums, Array]:
        block_rows = all_rows.block(start, tiling.block)

        def step(carry: tuple[Array, _KeySums], tile: Tile) -> tuple[Array, _KeySums]:
            d_query, sums = _backward_tile(head, block_rows, tile, carry[1])
            return carry[0] + d_query, sums

        parts = []
        for rows, tiles in edges(head, start):
            d_rows = []
            for tile in tiles:
                d_query, sums = _backward_tile(head, block_rows.part(rows), tile, sums)
                d_rows.append(d_query)
            parts.append(sum(d_rows))
        nothing = jnp.zeros(block_rows.query.shape, dtype)
        d_query = jnp.concatenate(parts) if parts else nothing
        d_query, sums = over_chunks(head, start, step, (d_query, sums))
        return sums, d_query

    sums, d_query = lax.scan(block, _KeySums.zeros(head), starts(tiling))
    real = slice(tiling.pad_before, tiling.pad_before + tiling.s)
    d_sink = None
    if head.sink is not None:
        weight = jnp.exp(_as_column(head, head.sink) - saved.top)
        d_sink = -(weight * delta).sum()
    return Floats(
        query=_rows(head, d_query),
        key=sums.key[:, real].T,
        value=sums.value[:, real].T,
        bias=sums.bias,
        sinks=d_sink,
        captured=sums.captured,
    )


class _KeySums(NamedTuple):
    # The gradients that all blocks of queries add to; of keys and values transposed.
    key: Float[Array, "h s"]
    value: Float[Array, "v s"]
    bias: Float[Array, "#t #s"] | None
    captured: tuple[Array, ...]

    @staticmethod
    def zeros(head: Head) -> _KeySums:
        score, dtype = head.score, head.sums
        captured = () if score is None else score.floats
        return _KeySums(
            key=jnp.zeros(head.key.shape[::-1], dtype),
            value=jnp.zeros(head.value.shape[::-1], dtype),
            bias=None if head.bias is None else jnp.zeros(head.bias.shape[2:], dtype),
            captured=tuple(jnp.zeros(x.shape, dtype) for x in captured),
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
        def own(x: Array, axis: int = 0) -> Array:
            return lax.dynamic_slice_in_dim(x, start, size, axis)

        return _Rows(
            query=own(self.query),
            cotangent=own(self.cotangent),
            delta=own(self.delta),
            top=own(self.top),
            query_t=own(self.query_t, 1),
            cotangent_t=own(self.cotangent_t, 1),
        )

    def part(self, at: slice) -> _Rows:
        return _Rows(
            query=self.query[at],
            cotangent=self.cotangent[at],
            delta=self.delta[at],
            top=self.top[at],
            query_t=self.query_t[:, at],
            cotangent_t=self.cotangent_t[:, at],
        )


def _prepare(head: Head, saved: Softmax, cotangent: Array) -> tuple[_Rows, Array]:
    # The sum is divided out here, so that no tile has to: with e = exp(x - top), dv = e^T do, dx =
    # e (do v^T - delta).
    empty = saved.total == 0
    share = jnp.where(empty, 0, 1 / jnp.where(empty, 1, saved.total))
    cotangent = cotangent.astype(head.sums) * share
    delta = (saved.output * cotangent).sum(axis=-1, keepdims=True)
    pad = ((0, head.query.shape[0] - head.tiling.t), (0, 0))
    padded = jnp.pad(cotangent, pad)
    # Padded rows see nothing, whatever a function of scores says.
    top = jnp.pad(saved.top, pad, constant_values=jnp.inf)
    return _Rows(head.query, padded, jnp.pad(delta, pad), top, head.query.T, padded.T), delta


def _backward_tile(head: Head, rows: _Rows, tile: Tile, sums: _KeySums) -> tuple[Array, _KeySums]:
    soft_cap = head.call.soft_cap
    masked, capped = scores(head, rows.query, tile)
    exps = jnp.exp(masked - rows.top)
    d_exps = head.dot(rows.cotangent, keys(head, head.value, tile).T)
    factors = dropout_factors(head, tile)
    dropped = exps
    if factors is not None:
        dropped, d_exps = exps * factors, d_exps * factors
    d_scores = exps * (d_exps - rows.delta)
    captured = sums.captured
    if head.score is not None:
        # Zeros where nothing is seen, for what overflowed: captured arrays sum over all pairs of
        # tokens.
        seen = exps != 0
        cleared = (jnp.where(seen, x, 0) for x in (capped, d_scores))
        d_scores, found = head.score.pull(tile.indices, *cleared)
        pairs = zip(captured, found, strict=True)
        captured = tuple(total + d.astype(total.dtype) for total, d in pairs)
    if soft_cap is not None:
        d_scores = d_scores * (1 - (capped / soft_cap) ** 2)
    # What overflowed where nothing is seen.
    d_scores = jnp.where(exps == 0, 0, d_scores)
    row, col = padded_start(head, tile)
    sums = _KeySums(
        key=add(sums.key, head.dot(rows.query_t, d_scores), (0, col)),
        value=add(sums.value, head.dot(rows.cotangent_t, dropped), (0, col)),
        bias=_with_bias(sums.bias, d_scores, row, col),
        captured=captured,
    )
    return head.dot(d_scores, keys(head, head.key, tile)), sums


def _with_bias(bias: Array | None, d_scores: Array, row: Array, col: Array) -> Array | None:
    if bias is None:
        return None
    rows, cols = bias.shape
    broadcast = tuple(axis for axis in (0, 1) if bias.shape[axis] == 1)
    at = 0 if rows == 1 else row, 0 if cols == 1 else col
    return add(bias, d_scores.sum(axis=broadcast, keepdims=True), at)
