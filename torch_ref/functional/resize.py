"""A table of positions of a grid, for a grid of another size."""

from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate


def resize_bicubic(
    table: Float[Tensor, "rows columns d"], rows: int, columns: int
) -> Float[Tensor, "rows2 columns2 d"]:
    """Return a table at the centres of `rows x columns` cells, by bicubic interpolation.

        out[i, j] = sum_{m, n} w(i, m) w(j, n) table[m, n]

    The weights w are cubic in the distance (Keys 1981, a = -0.75). What lies outside the table
    repeats its edge. The same as `torch.nn.functional.interpolate(mode="bicubic")`.

    Example:
        >>> import torch
        >>> resize_bicubic(torch.arange(4.0).reshape(2, 2, 1), 4, 2)[:, 0, 0]
        tensor([-0.2109,  0.4531,  1.5469,  2.2109])
    """
    image = rearrange(table, "rows columns d -> 1 d rows columns")
    resized = interpolate(image, size=(rows, columns), mode="bicubic", align_corners=False)
    return rearrange(resized, "1 d rows columns -> rows columns d")
