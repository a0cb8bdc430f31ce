"""A table of positions of a grid, for a grid of another size."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# Parameter of the cubic kernel, as in torch.
_SHARPNESS = -0.75


def resize_bicubic(
    table: Float[Array, "rows columns d"], rows: int, columns: int
) -> Float[Array, "rows2 columns2 d"]:
    """Return a table at the centres of `rows x columns` cells, by bicubic interpolation.

        out[i, j] = sum_{m, n} w(i, m) w(j, n) table[m, n]

    The weights w are cubic in the distance (Keys 1981, a = -0.75). What lies outside the table
    repeats its edge. The same as `torch.nn.functional.interpolate(mode="bicubic")`.

    Args:
        table: `(rows, columns, d)`.
        rows: number of rows of the result.
        columns: number of columns of the result.

    Example:
        >>> resize_bicubic(jnp.arange(4.0).reshape(2, 2, 1), 4, 2)[:, 0, 0]
        Array([-0.2109375,  0.453125 ,  1.546875 ,  2.2109375], dtype=float32)

    References:
        Keys 1981, "Cubic Convolution Interpolation for Digital Image Processing".
    """
    of_rows = jnp.asarray(_weights(table.shape[0], rows), table.dtype)
    of_columns = jnp.asarray(_weights(table.shape[1], columns), table.dtype)
    return jnp.einsum("im,jn,mnd->ijd", of_rows, of_columns, table, precision="highest")


def _weights(old: int, new: int) -> np.ndarray:
    """Return the weight of each of `old` entries in each of `new` ones, `(new, old)`."""
    centres = (np.arange(new) + 0.5) * old / new - 0.5
    # The cubic kernel reaches two entries to either side.
    entries = np.floor(centres).astype(int)[:, None] + np.arange(-1, 3)
    weights = _cubic(np.abs(centres[:, None] - entries))
    # Outside the table stands its edge.
    inside = np.clip(entries, 0, old - 1)
    return np.einsum("ns,nso->no", weights, np.eye(old)[inside])


def _cubic(distance: np.ndarray) -> np.ndarray:
    """Return the weights of entries at distances below 2."""
    a = _SHARPNESS
    x = distance
    near = ((a + 2) * x - (a + 3)) * x**2 + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, far)
