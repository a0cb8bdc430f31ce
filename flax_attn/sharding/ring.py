"""Ring attention: pieces of the keys travel from device to device, and each device attends to the one that it has.

Forward, softmaxes over the pieces are folded into one. Backward, a device computes its share of the gradients of each
piece from the log-sum-exp over all keys; the gradients of keys and values travel on with their piece, and then home.

References:
    Liu et al. 2023, "Ring Attention with Blockwise Transformers" (arXiv:2310.01889);
    Brandon et al. 2023, "Striped Attention" (arXiv:2311.09431).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from flax_attn.backends.blocked import BACKEND as BLOCKED
from flax_attn.backends.blocked.heads import CallArrays
from flax_attn.backends.call import Call
from flax_attn.functional.dropout import KeyedDropout
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.masks import Mask
from flax_attn.functional.places import Places
from flax_attn.functional.traced_score import TracedScore
from flax_attn.sharding.route import Route
from flax_attn.sharding.shards import Shard
from flax_attn.sharding.softmax import fold, fold_over, nothing, sinks_gradient, with_sinks


def attend_pieces(route: Route, shard: Shard, over: tuple[str, ...] = ()) -> Array:
    """Return the output of one device's queries over all pieces of the keys; in `jax.shard_map`.

    Args:
        route: of the pieces.
        shard: of this device.
        over: mesh axes over which devices have the same queries, and their softmaxes are folded into one.
    """
    call = shard.call
    scale = jnp.asarray(call.scale, accumulation_dtype(call.query.dtype))
    static = _Static(route, over, call.soft_cap, call.precision, call.platform, shard.s)
    captured = () if call.score is None else call.score.floats
    arrays = CallArrays(call.query, call.key, call.value, shard.bias, call.sinks, scale, captured)
    rest = _Rest(call.mask, call.score, call.dropout, shard.b, shard.n, shard.rows)
    output: Array = _attend(static, arrays, rest)
    return output.astype(call.query.dtype)


class _Rest(NamedTuple):
    """The arrays of a shard that have no gradients."""

    mask: Mask
    score: TracedScore | None  # whose captured arrays are not read
    dropout: KeyedDropout | None
    b: Places
    n: Places
    rows: Places | None


@dataclass(frozen=True)
class _Static:
    """What is known before tracing."""

    route: Route
    over: tuple[str, ...]
    soft_cap: float | None
    precision: Any
    platform: str
    s: int

    def call(self, arrays: CallArrays, rest: _Rest, piece: tuple[Array, Array], cols: Places) -> Call:
        """Return the call of this device's queries and a piece of the keys; sinks are no part of it."""
        score = None if rest.score is None else rest.score.with_floats(arrays.captured)
        numerics = (self.soft_cap, None, rest.dropout, self.precision, self.platform, score)
        call = Call(arrays.query, *piece, None, rest.mask, arrays.scale, *numerics)
        return Shard(call, arrays.bias, rest.b, rest.n, rest.rows, cols, self.s).as_call()


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, arrays: CallArrays, rest: _Rest) -> Array:
    return _forward(static, arrays, rest)[0]


def _forward(static: _Static, arrays: CallArrays, rest: _Rest) -> tuple[Array, tuple]:
    route = static.route

    def step(j, piece, sums, done):
        def with_piece():
            return fold(done, BLOCKED.forward(static.call(arrays, rest, piece, route.keys_of(j))))

        return sums, route.where_needed(j, with_piece, done)

    done = nothing(arrays.query, arrays.value.shape[3], arrays.scale.dtype)
    _, done = _over_pieces(route, (arrays.key, arrays.value), step, (), done)
    done = with_sinks(fold_over(done, static.over), arrays.sinks)
    return done.output, (arrays, rest, done)


def _backward(static: _Static, saved: tuple, cotangent: Array) -> tuple[CallArrays, None]:
    arrays, rest, done = saved
    route = static.route
    d_sinks = sinks_gradient(done, arrays.sinks, cotangent)
    # Where devices have the same output, the cotangent comes divided among them.
    cotangent = lax.psum(cotangent, static.over) if static.over else cotangent

    def step(j, piece, sums, found):
        def with_piece():
            cols = route.keys_of(j)
            call = static.call(arrays, rest, piece, cols)
            share = BLOCKED.backward(call, done, cotangent)
            d_piece = share.key, share.value
            return jax.tree.map(jnp.add, sums, d_piece), found.add(share, cols)

        return route.where_needed(j, with_piece, (sums, found))

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, done.output.dtype), arrays)
    found, pieces = _Own(zeros.query, zeros.bias, zeros.scale, zeros.captured), (arrays.key, arrays.value)
    (d_key, d_value), found = _over_pieces(route, pieces, step, (zeros.key, zeros.value), found)
    gradients = CallArrays(found.query, d_key, d_value, found.bias, d_sinks, found.scale, found.captured)
    return jax.tree.map(lambda d, x: d.astype(x.dtype), gradients, arrays), None


class _Own(NamedTuple):
    """Gradients that stay on their device."""

    query: Array
    bias: Array | None
    scale: Array
    captured: tuple[Array, ...]

    def add(self, share: CallArrays, cols: Places) -> _Own:
        """Return the gradients with the share of some keys."""
        bias = None if self.bias is None or share.bias is None else cols.put(self.bias, share.bias, 3)
        captured = jax.tree.map(jnp.add, self.captured, share.captured)
        return _Own(self.query + share.query, bias, self.scale + share.scale, captured)


def _over_pieces(route: Route, pieces: Any, step: Any, sums: Any, carry: Any) -> tuple[Any, Any]:
    """Return the sums of the pieces of this device, and its carry, after all pieces that it needs have passed by."""
    done, carry = route.travel(1, pieces, step, sums, carry, own=True)
    if route.hops[1] == 0:
        return done, carry
    more, carry = route.travel(-1, pieces, step, sums, carry, own=False)
    return jax.tree.map(jnp.add, done, more), carry


_attend.defvjp(_forward, _backward)
