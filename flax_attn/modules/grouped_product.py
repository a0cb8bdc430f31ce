"""Grouped matrix products: each row is multiplied by the matrix of its group alone.

Only in flax_attn: it saves work.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax.typing import PrecisionLike
from jax import lax
from jaxtyping import Array, Float, Integer

from flax_attn.backends.platform import platform_of
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.quantized import QuantizedMatrix
from flax_attn.modules import quantized_product as held
from flax_attn.native import grouped as native
from flax_attn.sharding.axes import mesh_of

# Rows of a tile; more are no quicker.
_LARGEST = 128


def grouped_product(
    rows: Float[Array, "m i"],
    matrices: Float[Array, "e i o"] | QuantizedMatrix,
    sizes: Integer[Array, " e"],
    precision: PrecisionLike = None,
) -> Float[Array, "m o"]:
    """Return the product of each row with the matrix of its group: `jax.lax.ragged_dot`.

    On CPUs XLA computes `jax.lax.ragged_dot` as the product of every row with every matrix. There,
    off a mesh, the product is computed by `flax_attn.native`, or, in float64 and without its
    library, by a loop over tiles of rows of one group. The loop has its own backward pass and no
    forward mode: `jax.jvp` of it raises.

    Args:
        rows: rows in the order of their groups.
        matrices: one matrix for each group; held in 8 or 4 bits they are `(e, o, i)`, and outside
            of the library widened to the dtype of the rows.
        sizes: number of rows of each group; rows after the last group give zeros.
        precision: precision of the products, as in `jax.lax.dot_general`.

    Example:
        >>> rows, matrices = jnp.arange(6.0).reshape(3, 2), jnp.stack([jnp.eye(2), 10 * jnp.eye(2)])
        >>> grouped_product(rows, matrices, jnp.array([1, 2])).tolist()
        [[0.0, 1.0], [20.0, 30.0], [40.0, 50.0]]
    """
    on_cpu = tiled(rows)
    if isinstance(matrices, QuantizedMatrix):
        if on_cpu and held.takes(rows, matrices, precision):
            product = held.quantized_product(rows, matrices, sizes, precision=precision)
            return product.astype(rows.dtype)
    elif on_cpu and native.takes(rows, matrices, precision):
        return native.grouped(rows, matrices, sizes)
    return grouped_product_of_xla(rows, matrices, sizes, precision)


def grouped_product_of_xla(
    rows: Array,
    matrices: Array | QuantizedMatrix,
    sizes: Array,
    precision: PrecisionLike = None,
) -> Array:
    """Return `grouped_product` without the library: XLA computes every product.

    Example:
        >>> rows, matrices = jnp.ones((3, 2)), jnp.stack([jnp.eye(2), 10 * jnp.eye(2)])
        >>> grouped_product_of_xla(rows, matrices, jnp.array([1, 2])).tolist()
        [[1.0, 1.0], [10.0, 10.0], [10.0, 10.0]]
    """
    if isinstance(matrices, QuantizedMatrix):
        matrices = matrices.kernels(rows.dtype)
    if tiled(rows):
        return _product(precision, rows, matrices, sizes)
    return lax.ragged_dot(rows, matrices, sizes, precision=precision)


def tiled(rows: Array) -> bool:
    """Return whether a product of these rows computes each group alone: on a CPU, off a mesh."""
    return platform_of(rows) == "cpu" and mesh_of(rows).empty


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(precision: PrecisionLike, rows: Array, matrices: Array, sizes: Array) -> Array:
    return _forward(precision, rows, matrices, sizes)[0]


def _forward(precision: PrecisionLike, rows: Array, matrices: Array, sizes: Array):
    product = _by_tiles(rows, matrices, sizes, partial(jnp.matmul, precision=precision))
    return product, (rows, matrices, sizes)


def _backward(precision: PrecisionLike, saved, cotangent: Array):
    rows, matrices, sizes = saved

    def transposed(tile: Array, matrix: Array) -> Array:
        return jnp.matmul(tile, matrix.T, precision=precision)

    # Rows and cotangents are grouped alike: the same loop, with each matrix transposed.
    of_rows = _by_tiles(cotangent, matrices, sizes, transposed)
    return of_rows, _outer(rows, cotangent, sizes, precision), None


_product.defvjp(_forward, _backward)


def _by_tiles(rows: Array, matrices: Array, sizes: Array, multiply) -> Array:
    """Return `multiply` of each tile and the matrix of its group."""
    tile, starts, _, groups, number = _tiles(len(rows), sizes)
    padded = jnp.pad(rows, ((0, tile), (0, 0)))
    # The width of the result, whichever way the matrix is multiplied.
    width = jax.eval_shape(multiply, padded[:1], matrices[0]).shape[-1]

    def step(i, product):
        start = starts[i]
        own = lax.dynamic_slice_in_dim(padded, start, tile)
        own = multiply(own, matrices[groups[i]])
        # Rows of the group behind are written too, and by its own tile after.
        return lax.dynamic_update_slice_in_dim(product, own, start, 0)

    zeros = jnp.zeros((len(padded), width), rows.dtype)
    product = lax.fori_loop(0, number, step, zeros)
    # Rows behind the last group were written by its tile, too.
    real = _first(len(rows), sizes.sum(dtype=sizes.dtype))
    return jnp.where(real, product[: len(rows)], 0)


def _first(m: int, count: Array) -> Array:
    """Return `(m, 1)`: True for the first `count` rows."""
    return jnp.arange(m, dtype=count.dtype)[:, None] < count


def _outer(rows: Array, cotangent: Array, sizes: Array, precision: PrecisionLike) -> Array:
    """Return the gradient of the matrices: the sum over the rows of each group."""
    tile, starts, counts, groups, number = _tiles(len(rows), sizes)
    # The last tile may reach beyond the rows, where a slice would be moved back into them.
    behind = (0, tile), (0, 0)
    left, right = jnp.pad(rows, behind), jnp.pad(cotangent, behind)
    # In float32 for lower dtypes: each tile adds to the sums of its group.
    dtype = accumulation_dtype(rows.dtype)

    def step(i, sums):
        start = starts[i]
        ours = lax.dynamic_slice_in_dim(left, start, tile)
        theirs = lax.dynamic_slice_in_dim(right, start, tile)
        # Behind the last row of a group its tile has rows of the next.
        real = _first(tile, counts[i])
        ours = jnp.where(real, ours, 0).T
        theirs = jnp.where(real, theirs, 0)
        product = jnp.matmul(ours, theirs, precision=precision, preferred_element_type=dtype)
        return sums.at[groups[i]].add(product)

    zeros = jnp.zeros((len(sizes), rows.shape[-1], cotangent.shape[-1]), dtype)
    sums = lax.fori_loop(0, number, step, zeros)
    return sums.astype(rows.dtype)


def _tiles(m: int, sizes: Array) -> tuple[int, Array, Array, Array, Array]:
    """Return the tile size, the start, rows and group of each tile, and the number of tiles.

    A tile has about as many rows as a group.
    """
    dtype, count = sizes.dtype, len(sizes)
    # The power of 2 at or below the rows of a group, which are known on average alone.
    log = max(0, (m // count).bit_length() - 1)
    tile = min(_LARGEST, 1 << log)
    tiles = -(-sizes // tile)
    ends = jnp.cumsum(tiles, dtype=dtype)
    ends_of_rows = jnp.cumsum(sizes, dtype=dtype)
    # As many as there can be: each group but one may end in a tile that is not full.
    i = jnp.arange(m // tile + count, dtype=dtype)
    groups = jnp.searchsorted(ends, i, side="right").astype(dtype)
    groups = jnp.minimum(groups, count - 1)
    first_tile = ends - tiles
    first_row = ends_of_rows - sizes
    within = (i - first_tile[groups]) * tile
    return tile, first_row[groups] + within, sizes[groups] - within, groups, ends[-1]
