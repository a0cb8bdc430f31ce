"""Rows of a batch: which of their tokens are real, and arrays of one row, or of none."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Shaped

from attn_spec.cache_checks import check_lengths, check_rows_of_lengths
from flax_attn.functional.integers import clipped
from flax_attn.functional.mask_arguments import as_integers
from flax_attn.functional.shapes import ArrayLike, RowLengths


def real_tokens(b: int, t: int, lengths: RowLengths) -> Bool[Array, "b t"]:
    """Return which of `t` tokens of `b` rows are real: the first `lengths` of each row.

    `lengths` is one number or `(b,)`; None is all.

    Example:
        >>> real_tokens(2, 3, jnp.array([2, 0])).tolist()
        [[True, True, False], [False, False, False]]
    """
    count = clipped(t if lengths is None else lengths, t)
    counts = jnp.broadcast_to(count, (b,))
    return jnp.arange(t, dtype=jnp.int32)[None] < counts[:, None]


def check_known_lengths(lengths: RowLengths, b: int, t: int) -> None:
    """Raise unless lengths are integers, one or `(b,)`, from 0 to `t` where their values are known.

    Known are those of Python and NumPy. Arrays of JAX are not read, so that no call waits for the
    device.

    Raises:
        ValueError: if they are not.

    Example:
        >>> check_known_lengths(jnp.array([9, 2]), b=2, t=3)
        >>> check_known_lengths([9, 2], b=2, t=3)  # doctest: +NORMALIZE_WHITESPACE
        Traceback (most recent call last):
        ...
        ValueError: lengths counts the real tokens of a call of t=3 tokens; got lengths=9.
        Use 0 to 3
    """
    if lengths is None:
        return
    counts = lengths if isinstance(lengths, Array) else np.asarray(lengths)
    as_integers("lengths", counts)
    check_rows_of_lengths(counts.shape, b)
    # To read an array would wait for the device.
    if isinstance(counts, Array):
        return
    for length in counts.flat:
        check_lengths(int(length), t)


def without_padding(
    numbers: ArrayLike, shape: tuple[int, ...], lengths: RowLengths
) -> Shaped[Array, "*b t"]:
    """Return numbers of tokens, with 0 for tokens behind `lengths`: these have no effect.

    Args:
        numbers: numbers of the tokens, such as ids; they broadcast to `shape`.
        shape: shape of the tokens, `(b, t)` or `(t,)`.
        lengths: how many tokens of each row are real, `(b,)`; None is all.

    Raises:
        ValueError: where `check_known_lengths` does.

    Example:
        >>> without_padding(jnp.array([[7, 8, -100]]), (1, 3), jnp.array([2])).tolist()
        [[7, 8, 0]]
    """
    numbers = jnp.asarray(numbers)
    if lengths is None:
        return numbers
    real = _are_real(shape, lengths)
    # 0 is in every table of ids and of positions.
    nothing = jnp.zeros_like(numbers)
    return jnp.where(real, numbers, nothing)


def _are_real(shape: tuple[int, ...], lengths: RowLengths) -> Array:
    b, t = (1, *shape)[-2:]
    check_known_lengths(lengths, b, t)
    return real_tokens(b, t, lengths).reshape(shape)


def shape_of(x: Array | None) -> tuple[int, ...] | None:
    """Return the shape of an array, None where there is none.

    Example:
        >>> shape_of(None) is None
        True
    """
    return None if x is None else x.shape


def batched(x: Array | None) -> Array | None:
    """Return an array as the one row of a batch, None where there is none.

    Example:
        >>> batched(None) is None
        True
    """
    return None if x is None else x[None]
