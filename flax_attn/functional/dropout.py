"""Counter-based dropout: the same key drops the same weights in both frameworks.

Whether a weight is dropped depends on its key and its own index and on nothing else: not on the
block size of a kernel, not on the order of evaluation, not on the framework. The random function is
Threefry-2x32 with 20 rounds, the one that `jax.random` is built on.

References:
    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (doi:10.1145/2063384.2063405);
    Srivastava et al. 2014, "Dropout" (jmlr.org/papers/v15/srivastava14a.html).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, UInt32

from attn_spec.attention_checks import check_key_data
from attn_spec.checks import check_rate, check_type
from flax_attn.functional.dtypes import dtype_name
from flax_attn.functional.shapes import Index

_Word = Integer[Array | np.ndarray, "..."]
_Words = tuple[_Word, _Word]
# The published constants: rotations of the rounds, and parity of the key schedule.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
# The constant of the key schedule: a parity over its words that is never 0.
_PARITY = 0x1BD11BDA


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyedDropout:
    """Dropout at `rate`, decided by `key`.

    Args:
        rate: probability that an element is dropped, in [0, 1).
        key: a `jax.random.key`, or its data, two uint32.

    Raises:
        ValueError: if `rate` lies outside [0, 1).

    Example:
        >>> import jax
        >>> KeyedDropout(0.1, jax.random.key(0)).rate
        0.1
    """

    rate: float = field(metadata={"static": True})
    # An Array, or what JAX's transforms put in its place.
    key: Any

    def __post_init__(self):
        check_rate(self.rate)

    def indices(self, *parts: Index) -> tuple[Index, ...]:
        """Return the indices `(b, n, t, s)` by which elements are decided."""
        return parts


def key_data(key: Array) -> UInt32[Array, "2"]:
    """Return the two integers that seed Threefry; of longer keys the first two.

    Example:
        >>> key_data(jax.random.key(7))
        Array([0, 7], dtype=uint32)
    """
    example = "jax.random.key(0), or its data, two uint32"
    check_type("a dropout key", key, jax.Array | np.ndarray, example)
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(key) if is_typed else jnp.asarray(key)
    check_key_data(data.shape, dtype_name(data.dtype))
    # Keys of other generators, such as rbg, are longer.
    return data[:2].astype(jnp.uint32)


def threefry_2x32(key: _Words, counter: _Words) -> _Words:
    """Encrypt a counter of two integers with a key of two: 20 rounds of add, rotate, xor.

    Arrays of NumPy are encrypted by NumPy, and nothing is compiled.

    Shapes:
        key, counter: two uint32 arrays each, of equal ranks or rank 0; all four broadcast together.

    Example:
        >>> zero = jnp.uint32(0)
        >>> [hex(x) for x in threefry_2x32((zero, zero), (zero, zero))]
        ['0x6b200159', '0x99ba4efe']
    """
    if all(isinstance(word, np.ndarray) for word in (*key, *counter)):
        return _encrypt(key, counter)
    return _encrypt_compiled(key, counter)


def _encrypt(key: _Words, counter: _Words) -> _Words:
    k0, k1 = key
    k2 = k0 ^ k1 ^ np.uint32(_PARITY)
    schedule = (k0, k1, k2)
    x0, x1 = counter
    x0 = x0 + k0
    x1 = x1 + k1
    # Five groups of four rounds; after each the key is added once more.
    for step in range(5):
        for rotation in _ROTATIONS[step % 2]:
            x0 = x0 + x1
            left = x1 << rotation
            right = x1 >> (32 - rotation)
            x1 = (left | right) ^ x0
        x0 = x0 + schedule[(step + 1) % 3]
        x1 = x1 + schedule[(step + 2) % 3]
        x1 = x1 + np.uint32(step + 1)
    return x0, x1


# Called eagerly it is one program, and not one for each operation; traced, the operations are seen.
_encrypt_compiled = jax.jit(_encrypt, inline=True)


def fold_in(key: Array | None, index: int | Integer[Array, ""]) -> UInt32[Array, "2"] | None:
    """Return the key of child `index`; None stays None.

    A block has a key, and each dropout inside it has a child of that key.

    Example:
        >>> bool((fold_in(jax.random.key(0), 1) == fold_in(jax.random.key(0), 2)).any())
        False
    """
    if key is None:
        return None
    seed = key_data(key)
    counter = (jnp.uint32(index), jnp.uint32(0))
    return jnp.stack(threefry_2x32((seed[0], seed[1]), counter))


def keep_mask(dropout: KeyedDropout, b: Index, n: Index, t: Index, s: Index) -> Array:
    """Return which elements survive: `threefry(threefry(key, (b, n)), (t, s)) >= rate * 2**32`.

    Shapes:
        b, n, t, s: integer index arrays that broadcast together; kernels pass those of a block.

    Example:
        >>> t, s = jnp.arange(2)[:, None], jnp.arange(6)[None, :]
        >>> zero = jnp.zeros((1, 1), int)
        >>> keep_mask(KeyedDropout(0.5, jax.random.key(0)), zero, zero, t, s).astype(int)
        Array([[1, 0, 1, 1, 0, 0],
               [0, 1, 0, 1, 0, 0]], dtype=int32)
    """
    seed = key_data(dropout.key)
    indices = dropout.indices(b, n, t, s)
    b, n, t, s = (index.astype(jnp.uint32) for index in indices)
    # A counter holds two of the four indices: the others make a key of their own.
    head_key = threefry_2x32((seed[0], seed[1]), (b, n))
    bits, _ = threefry_2x32(head_key, (t, s))
    return bits >= jnp.uint32(threshold(dropout.rate))


def threshold(rate: float) -> int:
    """Return the least of the random integers of 32 bits that keep an element."""
    # A rate just below 1 would round to 2**32, which has 33 bits.
    largest = 2**32 - 1
    return min(round(rate * 2**32), largest)


def keep_grid(dropout: KeyedDropout, shape: Sequence[int]) -> Array:
    """Return the whole `(b, n, t, s)` mask of `keep_mask`, for materialised arrays."""
    b, n, t, s = map(jnp.arange, shape)
    return keep_mask(
        dropout,
        b[:, None, None, None],
        n[None, :, None, None],
        t[None, None, :, None],
        s[None, None, None, :],
    )


def drop(weights: Float[Array, "*shape"], keep: Array, rate: float) -> Float[Array, "*shape"]:
    """Zero what is not kept and divide the rest by `1 - rate`, so that the mean stays."""
    return jnp.where(keep, weights / (1 - rate), 0)
