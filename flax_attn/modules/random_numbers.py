"""The numbers of `jax.random` without a program for each shape, and its keys without any program.

Called eagerly, `jax.random.uniform` compiles a program for each shape, which takes most of the
time of building a module. The numbers of a Threefry key do not depend on the shape: number i of the
flat array is the cipher of i (`jax_threefry_partitionable`). So one program draws any array, a
block after another, and NumPy draws small ones, to the same bits.

Only in flax_attn: PyTorch compiles nothing.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype
from jax.core import Tracer
from jaxtyping import Array

from flax_attn.functional.dropout import threefry_2x32

_FLOATS = ("bfloat16", "float16", "float32", "float64")
# Numbers in a block.
_SHORT, _LONG = 2**13, 2**18
# Up to as many are drawn in short blocks, and uniform ones by NumPy.
_FEW = 2**16
# Bytes that JAX on CPUs wants an array to be aligned to.
_ALIGNMENT = 64
# More numbers are drawn by a program of their shape: blocks pass through the memory of the host.
_MOST_ON_ACCELERATOR = 2**22


def constants_are_arrays(dtype: Dtype) -> bool:
    """Return whether NumPy may compute a parameter of this dtype: no transform or mesh is around.

    Example:
        >>> constants_are_arrays(jnp.float32), constants_are_arrays(jnp.int4)
        (True, False)
    """
    dtype = jnp.dtype(dtype)
    if dtype.name not in _FLOATS or jax.dtypes.canonicalize_dtype(dtype) != dtype:
        return False
    # Under a mesh JAX makes each device draw its own part.
    if not jax.sharding.get_abstract_mesh().empty:
        return False
    # Under a transform such as jax.jit, what is put on a device becomes part of the program.
    return not isinstance(jax.device_put(np.uint32(0)), Tracer)


def may_read(array: Array) -> bool:
    """Return whether an array is a scalar whose value is known, on one device of this process.

    Example:
        >>> may_read(jax.random.key(0)), may_read(jnp.ones(2))
        (True, False)
    """
    if isinstance(array, Tracer) or not isinstance(array, jax.Array) or array.shape:
        return False
    return array.is_fully_addressable and len(array.sharding.device_set) == 1


def is_threefry(key: Array) -> bool:
    """Return whether a key is a Threefry key, the default of JAX.

    Example:
        >>> is_threefry(jax.random.key(0)), is_threefry(jax.random.key(0, impl="rbg"))
        (True, False)
    """
    return jax.random.key_impl(key) == "threefry2x32"


def fold_in(key: Array, count: int) -> Array:
    """Return `jax.random.fold_in(key, count)` of a key of Threefry that may be read.

    Example:
        >>> key = jax.random.key(3)
        >>> bool(fold_in(key, 5) == jax.random.fold_in(key, 5))
        True
    """
    # As JAX does it: the count is a seed, whose key has an upper half of 0.
    data, counter = np.asarray(jax.random.key_data(key)), np.array([0, count], np.uint32)
    folded = threefry_2x32((data[:1], data[1:]), (counter[:1], counter[1:]))
    return jax.random.wrap_key_data(beside(key, np.concatenate(folded)), impl="threefry2x32")


def can_draw(key: Array, size: int, dtype: Dtype) -> bool:
    """Return whether `draw` can draw `size` numbers of this dtype from a key."""
    if not (constants_are_arrays(dtype) and may_read(key) and is_threefry(key)):
        return False
    # The other order of the numbers is one that only JAX itself knows.
    if not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
        return False
    # From an accelerator the blocks would be copied back to the host, one by one.
    on_cpu = all(device.platform == "cpu" for device in key.sharding.device_set)
    return on_cpu or size <= _MOST_ON_ACCELERATOR


def draw(key: Array, shape: tuple[int, ...], dtype: Dtype, scale: float, normal: bool) -> Array:
    """Return scaled numbers of `jax.random`: standard normal, or uniform in `[-1, 1)`.

    Args:
        key: a key for which `can_draw` returns True.
        shape: shape of the result.
        dtype: dtype of the result.
        scale: factor on the numbers.
        normal: whether the numbers are normal, rather than uniform.

    Example:
        >>> key = jax.random.key(3)
        >>> bool((draw(key, (7,), jnp.float32, 1.0, True) == jax.random.normal(key, (7,))).all())
        True
    """
    dtype = jnp.dtype(dtype)
    size = int(np.prod(shape))
    factor = np.array(scale, dtype)
    data = np.asarray(jax.random.key_data(key))
    few = size <= _FEW
    # Two lengths for all shapes: a block is compiled once for each length.
    length = _SHORT if few else _LONG
    numbers = _aligned(size, dtype)
    for first in range(0, size, length):
        last = min(first + length, size)
        if few and not normal:
            index = np.arange(first, last, dtype=np.uint32)
            block = _numbers_at(data, np.zeros(1, np.uint32), index, factor, False)
        else:
            start = np.array(divmod(first, 2**32), np.uint32)
            block = _block(data, start, factor, length, normal)
            block = np.asarray(block)
        numbers[first:last] = block[: last - first]
    return beside(key, numbers.reshape(shape))


@partial(jax.jit, static_argnums=(3, 4))
def _block(key: Array, start: Array, factor: Array, length: int, normal: bool) -> Array:
    """Return `length` numbers from `start` on: two integers, as the counter of the cipher is."""
    index = start[1] + jnp.arange(length, dtype=jnp.uint32)
    return _numbers_at(key, start[:1], index, factor, normal)


def _numbers_at(key: Any, high: Any, low: Any, factor: Any, normal: bool) -> Any:
    """Return the numbers at some places of a flat array, in NumPy or JAX as the arguments are."""
    bits = _bits((key[:1], key[1:]), high, low, factor.dtype)
    return factor * (_normal(bits, factor.dtype) if normal else _uniform(bits, factor.dtype))


def _bits(key: Any, high: Any, low: Any, dtype: np.dtype) -> Any:
    """Return the mantissa bits of the numbers that `jax.random` draws."""
    first, second = threefry_2x32(key, (high, low))
    info = jnp.finfo(dtype)
    unsigned = np.dtype(f"uint{info.bits}")
    if info.bits == 64:
        # Two words of 32 bits make one of 64; for narrower numbers they are mixed into one.
        high = first.astype(unsigned) << unsigned.type(32)
        bits = high | second.astype(unsigned)
    else:
        bits = (first ^ second).astype(unsigned)
    # The upper bits of the lowest 8 where these are enough, as they are for bfloat16.
    width = 8 if info.nmant < 8 else info.bits
    lowest = unsigned.type(2**width - 1)
    behind = unsigned.type(width - info.nmant)
    return (bits & lowest) >> behind


def _fractions(bits: Any, dtype: np.dtype) -> Any:
    """Return the numbers in [0, 1) that have these bits."""
    # The bits of the mantissa of a number in [1, 2), from which 1 is then taken.
    one = np.array(1, dtype)
    return (bits | one.view(bits.dtype)).view(dtype) - one


def _uniform(bits: Any, dtype: np.dtype) -> Any:
    """Return numbers in [-1, 1), which are exact."""
    return _fractions(bits, dtype) * np.array(2, dtype) - np.array(1, dtype)


def _normal(bits: Any, dtype: np.dtype) -> Any:
    """Return normal numbers: the inverse of their distribution at uniform ones in (-1, 1)."""
    # Not -1 itself, whose inverse is infinite.
    lowest = np.nextafter(np.array(-1, dtype), np.array(0, dtype), dtype=dtype)
    uniform = _fractions(bits, dtype) * np.array(2, dtype) + lowest
    return np.array(np.sqrt(2), dtype) * jax.lax.erf_inv(uniform)


def _aligned(size: int, dtype: np.dtype) -> np.ndarray:
    """Return memory for numbers, aligned so that JAX on CPUs takes it without a copy."""
    # More than is needed: the first aligned byte lies somewhere in the first 64.
    space = np.empty(size * dtype.itemsize + _ALIGNMENT, np.uint8)
    first = -space.ctypes.data % _ALIGNMENT
    return space[first : first + size * dtype.itemsize].view(dtype)


def beside(array: Array, values: np.ndarray) -> Array:
    """Return values as an array, on the device that another array is committed to.

    Example:
        >>> beside(jnp.ones(2), np.arange(3, dtype=np.uint32)).committed
        False
    """
    return jax.device_put(values, array.sharding if array.committed else None)
