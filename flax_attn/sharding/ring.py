"""Ring attention: keys travel from device to device, and each attends to the piece that it has.

Forward, softmaxes over the pieces are folded into one. Backward, a device computes its share of the
gradients of each piece from the log-sum-exp over all keys; the gradients of keys and values travel
on with their piece, and then home.

References:
    Liu et al. 2023, "Ring Attention with Blockwise Transformers" (arXiv:2310.01889);
    Brandon et al. 2023, "Striped Attention" (arXiv:2311.09431).
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from flax_attn.backends.backend import Backend
from flax_attn.backends.call import Call, Floats
from flax_attn.backends.softmax import Softmax
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.token_runs import Places
from flax_attn.sharding.ring_schedule import Route
from flax_attn.sharding.shards import Shard


def attend_pieces(
    backend: Backend, route: Route, shard: Shard, over: tuple[str, ...] = ()
) -> Array:
    """Return the output of one device's queries over all pieces of the keys; in `jax.shard_map`.

    Args:
        backend: backend that attends to one piece.
        route: route of the pieces.
        shard: shard of this device.
        over: mesh axes over which devices have the same queries, and their softmaxes are folded
            into one.
    """
    shard = replace(shard, call=shard.call.without_nonfinite_sinks())
    output: Array = _attend(backend, route, over, shard)
    return output.astype(shard.call.query.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(backend: Backend, route: Route, over: tuple[str, ...], shard: Shard) -> Array:
    return _forward(backend, route, over, shard)[0]


def _forward(
    backend: Backend, route: Route, over: tuple[str, ...], shard: Shard
) -> tuple[Array, tuple]:
    call = shard.call

    def step(j, piece, sums, done):
        def with_piece():
            part = backend.forward(_with_keys(shard, piece, route.keys_of(j)))
            return done.fold(part)

        return sums, route.where_needed(j, with_piece, done)

    dtype = accumulation_dtype(call.query.dtype)
    nothing = Softmax.over_nothing(call.query, call.value.shape[3], dtype)
    _, done = _over_pieces(route, (call.key, call.value), step, (), nothing)
    # Sinks come last: they are in the denominator once, not once for each piece.
    done = done.fold_over(over).with_sinks(call.sinks)
    return done.output, (shard, done)


def _backward(
    backend: Backend,
    route: Route,
    over: tuple[str, ...],
    saved: tuple[Shard, Softmax],
    cotangent: Array,
) -> tuple[Shard]:
    shard, done = saved
    call = shard.call
    d_sinks = done.sinks_gradient(call.sinks, cotangent)
    # Where devices have the same output, the cotangent comes divided among them.
    cotangent = lax.psum(cotangent, over) if over else cotangent

    def step(j, piece, sums, own):
        def with_piece():
            cols = route.keys_of(j)
            share = backend.backward(_with_keys(shard, piece, cols), done, cotangent)
            d_piece = share.key, share.value
            return jax.tree.map(jnp.add, sums, d_piece), _add(own, share, cols)

        return route.where_needed(j, with_piece, (sums, own))

    # In the dtype of the accumulation: each piece adds its share to them.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, done.output.dtype), call.floats)
    own = zeros._replace(key=None, value=None, sinks=None)
    pieces = call.key, call.value
    sums, own = _over_pieces(route, pieces, step, (zeros.key, zeros.value), own)
    d_key, d_value = sums
    d_call = call.cotangent(own._replace(key=d_key, value=d_value, sinks=d_sinks))
    without_gradients = jax.tree.map(lambda x: None, shard)
    return (replace(without_gradients, call=d_call),)


_attend.defvjp(_forward, _backward)


def _with_keys(shard: Shard, piece: tuple[Array, Array], cols: Places) -> Call:
    """Return the call of a device's queries and a piece of keys at `cols`, without the sinks."""
    key, value = piece
    call = replace(shard.call, key=key, value=value, sinks=None)
    return replace(shard, call=call, cols=cols).as_call()


def _add(own: Floats, share: Floats, cols: Places) -> Floats:
    """Return the gradients that stay on their device, with the share of some keys."""
    d_bias = own.bias
    # A device has the bias of all keys, and these are some of them.
    if own.bias is not None and share.bias is not None:
        d_bias = cols.put(own.bias, share.bias, 3)
    rest = share._replace(key=None, value=None, bias=None)
    added = jax.tree.map(jnp.add, own._replace(bias=None), rest)
    return added._replace(bias=d_bias)


def _over_pieces(route: Route, pieces: Any, step: Any, sums: Any, carry: Any) -> tuple[Any, Any]:
    """Return this device's sums and carry after all pieces that it needs have passed by."""
    done, carry = route.travel(1, pieces, step, sums, carry, own=True)
    if route.hops[1] == 0:
        return done, carry
    more, carry = route.travel(-1, pieces, step, sums, carry, own=False)
    return jax.tree.map(jnp.add, done, more), carry
