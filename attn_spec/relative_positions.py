"""What biases of relative positions are made of: the slopes of ALiBi, the buckets of T5.

References:
    Press et al. 2021 (arXiv:2108.12409); Raffel et al. 2019 (arXiv:1910.10683).
"""

from bisect import bisect_left

import numpy as np

from attn_spec.checks import check_positive


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Return the slope of every head: `2 ** (-8 i / num_heads)` for `i = 1 ... num_heads`.

    The slopes are float64. Where `num_heads` is not a power of two, the slopes of the power below
    come first, and then every other slope of the power above.

    Raises:
        ValueError: if `num_heads` is not positive.

    Example:
        >>> alibi_slopes(3).tolist()
        [0.0625, 0.00390625, 0.25]

    References:
        Press et al. 2021 (arXiv:2108.12409).
    """
    check_positive(num_heads=num_heads)
    power = 2 ** (num_heads.bit_length() - 1)
    below = _geometric_slopes(power)
    above = _geometric_slopes(2 * power)
    return np.concatenate([below, above[::2][: num_heads - power]])


def _geometric_slopes(count: int) -> np.ndarray:
    return 2.0 ** (-8 * np.arange(1, count + 1) / count)


def bucket_starts(buckets: int, max_distance: int) -> list[int]:
    """Return the smallest distance of every bucket of T5 but the first.

    In integers, from `log(distance / exact) * wide >= log(max_distance / exact) * j`.

    Raises:
        ValueError: if there are less than 2 buckets, or `max_distance` leaves no room for wide
            ones.

    Example:
        >>> bucket_starts(8, 32)
        [1, 2, 3, 4, 7, 12, 20]
    """
    exact = buckets // 2
    wide = buckets - exact
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            "T5 needs at least 2 buckets a direction, and a max_distance beyond the half of them"
            f" that hold one distance each; got {buckets} buckets a direction,"
            f" max_distance={max_distance}. Usual are 32 and 128"
        )
    starts = list(range(1, exact))
    distances = range(max_distance)
    for j in range(wide):
        power = max_distance**j * exact ** (wide - j)
        starts.append(bisect_left(distances, power, key=lambda distance: distance**wide))
    return starts
