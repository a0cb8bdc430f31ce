"""What both packages know of matrices that are held in 8 or 4 bits."""

# The numbers of 4 bits, E2M1; the fourth bit is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def check_blocks(
    weight: tuple[int, ...], scale: tuple[int, ...], sizes: tuple[int, int], block: tuple[int, int]
) -> None:
    """Raise unless there is a scale for each block.

    Args:
        weight: shape of the numbers.
        scale: shape of the scales.
        sizes: rows and columns of a matrix.
        block: rows and columns of a block.

    Raises:
        ValueError: if the shapes do not fit.

    Example:
        >>> check_blocks((4, 30), (1, 2), (4, 30), (8, 16))
    """
    pairs = zip(sizes, block, strict=True)
    blocks = tuple(-(-size // edge) for size, edge in pairs)
    wanted = (*weight[:-2], *blocks)
    if scale != wanted:
        raise ValueError(
            f"scale must have a number for each block of {block}, {wanted} for a weight of"
            f" {weight}; got {scale}. Pass the block that the scales belong to"
        )
