"""Rows of a mask that see no key: zeros here, and the mean of all values in other libraries."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.mask_part import of_rank_4
from flax_attn.functional.masks import Mask
from flax_attn.functional.outputs import Outputs

Empty = Bool[Array, "#b #n #t 1"]


def with_means(outputs: Outputs, value: Array, mask: Mask) -> Outputs:
    """Return outputs with the mean of the values, and weights of `1 / s`, in rows without a key.

    This is what a softmax gives where all scores are one large negative number.
    """
    *batch, t, n, _ = outputs.output.shape
    s, k = value.shape[-3:-1]
    b = batch[0] if batch else 1
    empty = empty_rows(mask, b, n, t, s)
    if empty is None:
        return outputs
    if not batch:
        empty = empty[0]
    # A sum of many values in 16 bits would round at each step.
    mean = value.mean(axis=-3, keepdims=True, dtype=accumulation_dtype(value.dtype))
    mean = mean.astype(value.dtype)
    # Queries of a group share a head of the values, and here each needs its own.
    mean = jnp.repeat(mean, n // k, axis=-2)
    return fill_rows(outputs, empty, mean, 1 / s)


def fill_rows(
    outputs: Outputs, empty: Bool[Array, "*#b #n #t 1"], output: Array | int, weight: float
) -> Outputs:
    """Return outputs with another output, and other weights, in some rows."""
    # The axes of heads and tokens change places between weights and outputs.
    tokens_first = jnp.swapaxes(empty, -3, -2)
    filled = jnp.where(tokens_first, output, outputs.output)
    if outputs.weights is None:
        return Outputs(filled)
    weights = jnp.where(empty, jnp.asarray(weight, outputs.weights.dtype), outputs.weights)
    return Outputs(filled, weights)


def empty_rows(mask: Mask, b: int, n: int, t: int, s: int) -> Empty | None:
    """Return which rows see no key, or None where it is known that each row sees one."""
    mask = mask.resolve(b, n, t, s)
    # The band is of Python's numbers, so that nothing is computed for the most common masks.
    band, rest = mask.split_band()
    if not rest.parts and _all_see(*band, t, s):
        return None
    (start, stop), rest = mask.split_intervals(t, s)
    if not rest.parts:
        empty = start >= stop
        return empty[:, None, :, None]
    # XLA would compute what it is asked of an array that is a constant, which takes seconds.
    mask = jax.lax.optimization_barrier(mask)
    # XLA makes one loop of the mask and of what it is asked for, and keeps no array of all scores.
    rows, columns = jnp.arange(t), jnp.arange(s)
    visible = of_rank_4(mask.block(rows, columns))
    sees_a_key = visible.any(axis=-1, keepdims=True)
    return ~sees_a_key


def _all_see(low: int | None, high: int | None, t: int, s: int) -> bool:
    """Return whether each row sees a key, where row i sees those from `i + low` to `i + high`."""
    # The first key less the last one is convex in the row: it is largest in one of these two.
    for row in (0, t - 1):
        first = 0 if low is None else max(0, row + low)
        last = s - 1 if high is None else min(s - 1, row + high)
        if first > last:
            return False
    return True
