"""Tokens of a batch in the order in which attention takes them, put in it once for all layers."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from flax_attn.functional.dropout import KeyedDropout
from flax_attn.functional.padding import without_padding
from flax_attn.functional.shapes import ArrayLike
from flax_attn.functional.token_runs import PlacedDropout, Places
from flax_attn.sharding.axes import constrain, device_count, mesh_axes, mesh_of
from flax_attn.sharding.options import in_use
from flax_attn.sharding.zigzag_order import pieces, zigzag


def arranged(x: Array) -> Array:
    """Return numbers of tokens, `(b, t)` or `(t,)`, in the order that `context_parallel` was given.

    That is the zigzag order with `order="zigzag"`, and that of the tokens otherwise. They are few,
    so that they are gathered, reordered and split again.

    Raises:
        ValueError: if no mesh in use splits tokens, or if they do not divide into two pieces a
            device.

    Example:
        >>> arranged(jnp.arange(4)).tolist()
        [0, 1, 2, 3]
    """
    if in_use().order == "natural":
        return x
    # Whole first: to move pieces between devices XLA would gather them in any case.
    names = ["batch", None][-x.ndim :]
    whole = constrain(x, *names)
    return constrain(zigzag(whole, _devices(), x.ndim - 1), "batch", "tokens")


def without_arranged_padding(
    numbers: ArrayLike, shape: tuple[int, ...], lengths: ArrayLike | int | None
) -> Array:
    """Return token ids in the order of `arranged`, 0 for padding; see `without_padding`.

    Example:
        >>> without_arranged_padding(jnp.array([7, 8, -100]), (3,), 2).tolist()
        [7, 8, 0]
    """
    if lengths is None:
        return jnp.asarray(numbers)
    real = arranged(without_padding(jnp.ones(shape, bool), shape, lengths))
    return jnp.where(real, jnp.asarray(numbers), 0)


def arranged_positions(t: int) -> Array | None:
    """Return the positions of tokens in zigzag order; None where they are in natural order.

    Example:
        >>> arranged_positions(4) is None
        True
    """
    return None if in_use().order == "natural" else arranged(jnp.arange(t))


def arranged_dropout(dropout: KeyedDropout, t: int) -> KeyedDropout:
    """Return dropout that drops the same of each token, whatever the order of the tokens.

    Args:
        dropout: dropout over the indices `(b, n, t, s)`.
        t: number of tokens.

    Example:
        >>> import jax
        >>> arranged_dropout(KeyedDropout(0.1, jax.random.key(0)), 4).rate
        0.1
    """
    if in_use().order == "natural":
        return dropout
    # Rows, heads and features stay where they are.
    same = Places(np.zeros(1, np.int32), 1)
    return PlacedDropout(dropout.rate, dropout.key, (same, same, _arranged_places(t), same))


def _arranged_places(t: int) -> Places:
    order = np.array(pieces(_devices()), np.int32)
    size = t // len(order)
    return Places(order * size, size)


def _devices() -> int:
    mesh = mesh_of()
    axes = mesh_axes("tokens", mesh)
    if not axes:
        raise ValueError(
            "the zigzag order is that of tokens that a mesh splits; got a mesh with axes"
            f' {mesh.axis_names}. Pass order="natural", or set a mesh with an axis for tokens with'
            " jax.set_mesh"
        )
    return device_count(mesh, axes)
