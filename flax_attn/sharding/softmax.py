"""Softmaxes over parts of the keys, folded into one."""

from __future__ import annotations

import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float

from flax_attn.backends.blocked.passes import Partial


def nothing(query: Array, width: int, dtype) -> Partial:
    """Return the softmax over no keys, with values of a width."""
    b, t, n, _ = query.shape
    top = jnp.full((b, n, t, 1), float(jnp.finfo(dtype).min), dtype)
    return Partial(jnp.zeros((b, t, n, width), dtype), top, jnp.zeros((b, n, t, 1), dtype))


def fold(one: Partial, other: Partial) -> Partial:
    """Return the softmax over the keys of both: the outputs, each divided by its sum, weighed by their sums."""
    top = jnp.maximum(one.top, other.top)
    shares = [part.total * jnp.exp(part.top - top) for part in (one, other)]
    total = shares[0] + shares[1]
    weights = [tokens_first(share / jnp.where(total == 0, 1, total)) for share in shares]
    return Partial(one.output * weights[0] + other.output * weights[1], top, total)


def fold_over(done: Partial, axes: tuple[str, ...]) -> Partial:
    """Return the softmax over the keys of all devices along mesh axes; in `jax.shard_map`."""
    if not axes:
        return done
    top = lax.pmax(lax.stop_gradient(done.top), axes)  # any number will do, and a maximum has no derivative here
    share = done.total * jnp.exp(done.top - top)
    total = lax.psum(share, axes)
    weight = share / jnp.where(total == 0, 1, total)
    return Partial(lax.psum(done.output * tokens_first(weight), axes), top, total)


def with_sinks(done: Partial, sinks: Float[Array, " n"] | None) -> Partial:
    """Return the softmax with a key more, of this score a head and with a value of zero."""
    if sinks is None:
        return done
    score = jnp.broadcast_to(sinks.astype(done.top.dtype)[None, :, None, None], done.top.shape)
    return fold(done, Partial(jnp.zeros_like(done.output), score, jnp.ones_like(done.total)))


def sinks_gradient(done: Partial, sinks: Float[Array, " n"] | None, cotangent: Array) -> Array | None:
    """Return the gradient of the sinks: `-sum w (o do)`, where w is the weight that a sink has in its row."""
    if sinks is None:
        return None
    delta = rearrange((done.output * cotangent).sum(axis=-1), "b t n -> b n t 1")
    weight = jnp.exp(sinks.astype(done.top.dtype)[None, :, None, None] - done.top) / done.total
    return -(weight * delta).sum(axis=(0, 2, 3)).astype(sinks.dtype)


def tokens_first(x: Array) -> Array:
    """Return `(b, n, t, 1)` as `(b, t, n, 1)`."""
    return rearrange(x, "b n t 1 -> b t n 1")
