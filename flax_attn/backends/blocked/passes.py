"""Forward and backward over the tiles of one head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from flax_attn.backends.blocked.slices import add, add_as
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
from flax_attn.backends.softmax import Softmax, Sums, reciprocal
from flax_attn.backends.tile import score_gradients, times


def forward(head: Head) -> Softmax:
    """Return the output of one head, divided by its sum, and the softmax's maximum and sum."""
    blocks = lax.map(partial(_forward_block, head), starts(head.tiling))
    return jax.tree.map(partial(_rows, head), blocks)


def _forward_block(head: Head, start: Array) -> Softmax:
    query = lax.dynamic_slice_in_dim(head.query, start, head.tiling.block)

    def step(done: Sums, tile: Tile) -> Sums:
        return done & _forward_tile(head, query, tile)

    done = _at_edges(head, query, start)
    return _finish(head, over_chunks(head, start, step, done))


def _at_edges(head: Head, query: Array, start: Array) -> Sums:
    parts = []
    for rows, tiles in edges(head, start):
        own = [_forward_tile(head, query[rows], tile) for tile in tiles]
        parts.append(reduce(Sums.__and__, own))
    return _joined(parts) if parts else _nothing(head)


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
    kept = times(exps, dropout_factors(head, tile))
    return Sums(head.dot(kept, keys(head, head.value, tile)), top, total)


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
    tiling = head.tiling
    all_rows, delta = _prepare(head, saved, cotangent)
    block = partial(_backward_block, head, all_rows)
    sums, d_query = lax.scan(block, _KeySums.zeros(head), starts(tiling))
    real = slice(tiling.pad_before, tiling.pad_before + tiling.s)
    return Floats(
        query=_rows(head, d_query),
        key=sums.key[:, real].T,
        value=sums.value[:, real].T,
        bias=sums.bias,
        sinks=None if head.sink is None else _sink_gradient(head, head.sink, saved.top, delta),
        captured=sums.captured,
    )


def _sink_gradient(head: Head, sink: Array, top: Array, delta: Array) -> Array:
    weight = jnp.exp(_as_column(head, sink) - top)
    return -(weight * delta).sum()


def _backward_block(head: Head, all_rows: _Rows, sums: _KeySums, start: Array) -> _Carry:
    rows = all_rows.block(start, head.tiling.block)
    step = partial(_backward_step, head, rows)
    return over_chunks(head, start, step, _backward_edges(head, rows, sums, start))


def _backward_step(head: Head, rows: _Rows, carry: _Carry, tile: Tile) -> _Carry:
    sums, d_query = carry
    d_rows, sums = _backward_tile(head, rows, tile, sums)
    return sums, d_query + d_rows


def _backward_edges(head: Head, block: _Rows, sums: _KeySums, start: Array) -> _Carry:
    parts = []
    for rows, tiles in edges(head, start):
        sums, d_query = _backward_rows(head, block.part(rows), tiles, sums)
        parts.append(d_query)
    return sums, jnp.concatenate(parts or [jnp.zeros(block.query.shape, head.sums)])


def _backward_rows(head: Head, rows: _Rows, tiles: Sequence[Tile], sums: _KeySums) -> _Carry:
    parts = []
    for tile in tiles:
        d_query, sums = _backward_tile(head, rows, tile, sums)
        parts.append(d_query)
    return sums, reduce(jnp.add, parts)


class _KeySums(NamedTuple):
    # The gradients that all blocks of queries add to; of keys and values transposed.
    key: Float[Array, "h s"]
    value: Float[Array, "v s"]
    bias: Float[Array, "#t #s"] | None
    captured: tuple[Array, ...]

    @staticmethod
    def zeros(head: Head) -> _KeySums:
        zeros = partial(jnp.zeros, dtype=head.sums)
        bias = None if head.bias is None else zeros(head.bias.shape[2:])
        floats = () if head.score is None else head.score.floats
        captured = tuple(zeros(x.shape) for x in floats)
        return _KeySums(zeros(head.key.shape[::-1]), zeros(head.value.shape[::-1]), bias, captured)


# With the gradient of some queries.
_Carry = tuple[_KeySums, Array]


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
    cotangent = cotangent.astype(head.sums) * reciprocal(saved.total)
    delta = (saved.output * cotangent).sum(axis=-1, keepdims=True)
    pad = ((0, head.query.shape[0] - head.tiling.t), (0, 0))
    cotangent = jnp.pad(cotangent, pad)
    rows = _Rows(
        query=head.query,
        cotangent=cotangent,
        delta=jnp.pad(delta, pad),
        # Padded rows see nothing, whatever a function of scores says.
        top=jnp.pad(saved.top, pad, constant_values=jnp.inf),
        query_t=head.query.T,
        cotangent_t=cotangent.T,
    )
    return rows, delta


def _backward_tile(head: Head, rows: _Rows, tile: Tile, sums: _KeySums) -> tuple[Array, _KeySums]:
    masked, capped = scores(head, rows.query, tile)
    exps = jnp.exp(masked - rows.top)
    d_exps = head.dot(rows.cotangent, keys(head, head.value, tile).T)
    factors = dropout_factors(head, tile)
    found = score_gradients(
        exps,
        times(d_exps, factors),
        rows.delta,
        capped,
        head.call.soft_cap,
        pull=None if head.score is None else partial(head.score.pull, tile.indices),
    )
    row, col = padded_start(head, tile)
    sums = _KeySums(
        key=add(sums.key, head.dot(rows.query_t, found.scores), (0, col)),
        value=add(sums.value, head.dot(rows.cotangent_t, times(exps, factors)), (0, col)),
        bias=_with_bias(sums.bias, found.scores, row, col),
        captured=tuple(map(add_as, sums.captured, found.captured)),
    )
    return head.dot(found.scores, keys(head, head.key, tile)), sums


def _with_bias(bias: Array | None, d_scores: Array, row: Array, col: Array) -> Array | None:
    if bias is None:
        return None
    rows, cols = bias.shape
    broadcast = tuple(axis for axis in (0, 1) if bias.shape[axis] == 1)
    at = 0 if rows == 1 else row, 0 if cols == 1 else col
    return add(bias, d_scores.sum(axis=broadcast, keepdims=True), at)
