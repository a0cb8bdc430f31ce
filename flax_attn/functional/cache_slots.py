"""The slots of a cache, and the writing of new tokens into them."""

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Integer

from flax_attn.functional.explicit_sharding import split_as
from flax_attn.native import write_tokens as native
from flax_attn.native.primitive import batch_by_mapping, primitive


def token_slots(
    positions: Integer[Array, "b t"], count: Integer[Array, " b"], capacity: int, *, ring: bool
) -> Integer[Array, "b t"]:
    """Return the slot of each new token; a token in slot `capacity` is not stored.

    Args:
        positions: positions of the tokens in their sequences, `(b, t)`.
        count: how many tokens of each row are real, `(b,)`.
        capacity: number of slots.
        ring: whether the cache is a ring buffer, in which tokens overwrite those before them.

    Example:
        >>> token_slots(jnp.array([[7, 8, 9]]), jnp.array([3]), 2, ring=True)
        Array([[2, 0, 1]], dtype=int32)
    """
    i = jnp.arange(positions.shape[1], dtype=jnp.int32)[None]
    count = count[:, None]
    stored = i < count
    if not ring:
        # The slot behind the last one: what is written there is dropped.
        return jnp.where(stored, positions, capacity)
    # Of tokens that share a slot, the last one is stored: the order of writes is not defined.
    stored = stored & (i >= count - capacity)
    return jnp.where(stored, positions % capacity, capacity)


def write_tokens(
    cached: Float[Array, "b k s h"],
    new: Float[Array, "b t k h"],
    slots: Integer[Array, "b t"] | int,
) -> Float[Array, "b k s h"]:
    """Return an array of a cache with new tokens in it.

    Args:
        cached: `(b, k, s, h)`.
        new: `(b, t, k, h)`.
        slots: slot of each new token, `(b, t)`; a token in slot s is not stored. An integer is the
            slot of the first token of every row, which the others follow.

    Example:
        >>> new = jnp.array([7.0, 8.0]).reshape(1, 2, 1, 1)
        >>> write_tokens(jnp.zeros((1, 1, 3, 1)), new, jnp.array([[1, 3]]))[0, 0, :, 0]
        Array([0., 7., 0.], dtype=float32)
    """
    dtype = cached.dtype
    new = new.astype(dtype)
    if isinstance(slots, int):
        return _from_slot(cached, new, slots)
    if dtype.itemsize == 2:
        return _write_16_bits(cached, new, slots)
    return _write(cached, new, slots)


def _write(cached: Array, new: Array, slots: Array) -> Array:
    if len(new) == 1:
        return _to_one_row(cached, new, slots)
    return _to_rows(cached, new, slots)


def _from_slot(cached: Array, new: Array, first: int) -> Array:
    # One slice for all rows: what is written beyond a row's length is hidden, and overwritten in
    # time.
    place = cached.at[:, :, first : first + new.shape[1]]
    heads_first = rearrange(new, "b t k h -> b k t h")
    return place.set(heads_first, out_sharding=_split(cached, new))


def _to_one_row(cached: Array, new: Array, slots: Array) -> Array:
    # Head by head: of a whole token XLA makes a slice, which it does not write in place.
    heads = jnp.arange(new.shape[2])[None]
    place = cached[0].at[heads, slots[0][:, None]]
    split = split_as(cached, 1, 2, 3) or split_as(new, 2, None, 3)
    return place.set(new[0], mode="drop", out_sharding=split)[None]


def _to_rows(cached: Array, new: Array, slots: Array) -> Array:
    rows = jnp.arange(len(new))[:, None]
    place = cached.at[rows, :, slots]
    return place.set(new, mode="drop", out_sharding=_split(cached, new))


def _split(cached: Array, new: Array) -> NamedSharding | None:
    # A cache that was made without a mesh is split as the tokens that come to it.
    return split_as(cached, *range(4)) or split_as(new, 0, 2, None, 3)


@jax.custom_jvp
def _write_16_bits(cached: Array, new: Array, slots: Array) -> Array:
    if native.takes(cached):
        return _in_place.bind(cached, new, slots)
    return _as_bits(cached, new, slots)


@_write_16_bits.defjvp
def _differentiate(primals, tangents):
    slots = primals[2]

    def in_floats(cached: Array, new: Array) -> Array:
        return _write(cached, new, slots)

    _, change = jax.jvp(in_floats, primals[:2], tangents[:2])
    return _write_16_bits(*primals), change


def _as_bits(cached: Array, new: Array, slots: Array) -> Array:
    # Written as integers: XLA for CPUs would make float32 of the whole cache, and back. It copies
    # the cache for the one and the other type still.
    cached_bits = jax.lax.bitcast_convert_type(cached, jnp.uint16)
    new_bits = jax.lax.bitcast_convert_type(new, jnp.uint16)
    written = _write(cached_bits, new_bits, slots)
    return jax.lax.bitcast_convert_type(written, cached.dtype)


_in_place = primitive("native_write_tokens", native.write_tokens, _as_bits, ())
batch_by_mapping(_in_place, _as_bits)
