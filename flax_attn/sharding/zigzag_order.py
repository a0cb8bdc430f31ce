"""The zigzag order of tokens, in which devices have equal shares of causal work.

With P devices a sequence is cut into 2 P pieces of equal size. Device i has an early piece, i, and
a late one, 2 P - 1 - i.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attn_spec.checks import check_positive
from flax_attn.functional.token_runs import Places

T = TypeVar("T", Array, np.ndarray)


def pieces(devices: int) -> list[int]:
    """Return the pieces in zigzag order.

    Example:
        >>> pieces(3)
        [0, 5, 1, 4, 2, 3]
    """
    return [piece for i in range(devices) for piece in (i, 2 * devices - 1 - i)]


def zigzag(x: T, devices: int, axis: int = 1) -> T:
    """Return tokens in zigzag order, to be divided over a number of devices.

    Args:
        x: an array of JAX or NumPy.
        devices: number of devices that share the axis of tokens: its mesh axes multiplied.
        axis: axis of the tokens.

    Raises:
        ValueError: if the tokens do not divide into two pieces a device.

    Example:
        >>> zigzag(np.arange(8), devices=2, axis=0)
        array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    return _reorder(x, pieces(devices), axis, devices)


def unzigzag(x: T, devices: int, axis: int = 1) -> T:
    """Return tokens that are in zigzag order in their own order: the inverse of `zigzag`.

    Example:
        >>> unzigzag(zigzag(np.arange(8), devices=2, axis=0), devices=2, axis=0)
        array([0, 1, 2, 3, 4, 5, 6, 7])
    """
    return _reorder(x, np.argsort(pieces(devices)).tolist(), axis, devices)


def _reorder(x: Any, order: list[int], axis: int, devices: int) -> Any:
    check_positive(devices=devices)
    check_pieces(x.shape[axis], devices)
    size = x.shape[axis] // len(order)
    # `axis` may count from the end, where `axis + 1` may be 0.
    before, behind = x.shape[:axis], x.shape[axis:][1:]
    split = x.reshape(*before, len(order), size, *behind)
    return split.take(np.array(order), axis=len(before)).reshape(x.shape)


def check_pieces(tokens: int, devices: int) -> None:
    """Raise unless tokens divide into two pieces a device."""
    if tokens % (2 * devices):
        short = -tokens % (2 * devices)
        raise ValueError(
            f"the zigzag order cuts a sequence in two equal pieces a device; got {tokens} tokens on"
            f" {devices} devices. Add {short} tokens of padding and hide them with Mask.lengths, or"
            " use balance='none'"
        )


def exchange(x: Array, axis_name: tuple[str, ...], axis: int = 1) -> Array:
    """Move a device's tokens from their own order to zigzag order, in `jax.shard_map`.

    Every device has two neighbouring pieces, one even and one odd, and sends each to the device
    that has it in zigzag.
    """
    to_even, to_odd = _targets(jax.lax.axis_size(axis_name))
    even, odd = jnp.split(x, 2, axis)
    even = jax.lax.ppermute(even, axis_name, list(enumerate(to_even)))
    odd = jax.lax.ppermute(odd, axis_name, list(enumerate(to_odd)))
    return jnp.concatenate(_swapped_if_odd(even, odd, axis_name), axis)


def exchange_back(x: Array, axis_name: tuple[str, ...], axis: int = 1) -> Array:
    """Move a device's tokens from zigzag order to their own: the inverse of `exchange`."""
    to_even, to_odd = _targets(jax.lax.axis_size(axis_name))
    early, late = jnp.split(x, 2, axis)
    even, odd = _swapped_if_odd(early, late, axis_name)
    even = jax.lax.ppermute(even, axis_name, [(to, i) for i, to in enumerate(to_even)])
    odd = jax.lax.ppermute(odd, axis_name, [(to, i) for i, to in enumerate(to_odd)])
    return jnp.concatenate([even, odd], axis)


def zigzag_places(axis_name: tuple[str, ...], size: int, within: int = 1) -> Places:
    """Return the places in zigzag order of a device's `size` tokens, or of `within` neighbours'."""
    devices = jax.lax.axis_size(axis_name)
    first = jax.lax.axis_index(axis_name) // within * within
    # The early pieces of neighbours follow one another, and so do their late ones.
    piece = size // (2 * within)
    early, late = first, 2 * devices - within - first
    return Places(jnp.stack([early, late]) * piece, within * piece)


def joined(x: Array, devices: int, axis: int = 1) -> Array:
    """Put the tokens of neighbouring devices, joined in zigzag order, in their own order."""
    return _reorder(x, _joined_order(devices), axis, devices)


def unjoined(x: Array, devices: int, axis: int = 1) -> Array:
    """Return tokens in the order in which `joined` takes them: its inverse."""
    return _reorder(x, np.argsort(_joined_order(devices)).tolist(), axis, devices)


def _joined_order(devices: int) -> list[int]:
    # Each device brings an early and a late piece: all early ones, then the late ones backwards.
    return [*range(0, 2 * devices, 2), *range(2 * devices - 1, 0, -2)]


def _targets(devices: int) -> tuple[list[int], list[int]]:
    """Return the device that has in zigzag order each device's even piece, and its odd one."""
    found = [min(piece, 2 * devices - 1 - piece) for piece in range(2 * devices)]
    return found[::2], found[1::2]


def _swapped_if_odd(first: Array, second: Array, axis_name: tuple[str, ...]) -> list[Array]:
    # The early piece of an odd device is odd.
    odd = jax.lax.axis_index(axis_name) % 2 == 1
    return [jnp.where(odd, second, first), jnp.where(odd, first, second)]
