"""Triangular matrices of a block of tokens, made by halves: of 1 token, of 2, of 4, ...

Only in flax_attn: torch_ref computes token by token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax.typing import PrecisionLike
from jaxtyping import Array


class Pairs(NamedTuple):
    """The products and decays between the tokens of a block.

    Args:
        products: `(r, p, t, t)`, products of token i with the tokens j <= i.
        before: `(r, t, h)`, sums of the logarithms of decays from the first token up to each.
        after: `(r, t, h)`, sums of those behind each token up to the last.
    """

    products: Array
    before: Array
    after: Array


def decayed_products(x: Array, y: Array, decay: Array, precision: PrecisionLike = None) -> Pairs:
    """Return the products of tokens, decayed from each token to each later one.

        sum_h x_ih y_jh exp(decay_{j+1,h} + ... + decay_ih)    for j <= i, and 0 for the others

    Args:
        x: `(r, p, t, h)`, t a power of 2.
        y: `(r, t, h)`.
        decay: `(r, t, h)` or `(r, t, 1)`, at most 0.
        precision: precision of the matrix products.

    Example:
        >>> x, y = jnp.ones((1, 1, 2, 3)), jnp.ones((1, 2, 3))
        >>> decay = jnp.log(jnp.array([[[0.5], [0.25]]]))
        >>> decayed_products(x, y, decay).products[0, 0]
        Array([[3.  , 0.  ],
               [0.75, 3.  ]], dtype=float32)
    """
    if decay.shape[-1] > 1:
        return _by_halves(x, y, decay, precision)
    one = jnp.ones_like(decay)
    weights, before, after = _by_halves(one[:, None], one, decay, precision)
    return Pairs(weights * _rows_with_columns(x, y, precision), before, after)


def _by_halves(x: Array, y: Array, decay: Array, precision: PrecisionLike) -> Pairs:
    """Return the pairs of blocks of 1 token, then of 2, 4, ... until there is one block.

    Two tokens meet at the border of their halves: the decays on either side of it are sums of
    logarithms, and at most 1. A difference of sums from the start would lose its digits where the
    decay is strong.
    """
    products = rearrange((x * y[:, None]).sum(-1), "r p m -> r m p 1 1")
    before, after = decay[:, :, None], jnp.zeros_like(decay)[:, :, None]
    while products.shape[1] > 1:
        (start, late), (early, end) = (
            rearrange(z, "r (m two) s h -> two r m s h", two=2) for z in (before, after)
        )
        first, last = rearrange(products, "r (m two) p i j -> two r m p i j", two=2)
        size = products.shape[-1]
        rows = rearrange(x, "r p (m two s) h -> two r m p s h", two=2, s=size)[1]
        columns = rearrange(y, "r (m two s) h -> two r m s h", two=2, s=size)[0]
        low = _rows_with_columns(
            rows * jnp.exp(late)[:, :, None], columns * jnp.exp(early), precision
        )
        products = _stack_lower(first, low, last)
        before = jnp.concatenate([start, late + start[:, :, -1:]], axis=2)
        after = jnp.concatenate([early + late[:, :, -1:], end], axis=2)
    return Pairs(products[:, 0], before[:, 0], after[:, 0])


def _rows_with_columns(x: Array, y: Array, precision: PrecisionLike) -> Array:
    """Return the products of `(..., p, i, h)` and `(..., j, h)`, `(..., p, i, j)`."""
    found = jnp.matmul(rearrange(x, "... p i h -> ... (p i) h"), y.mT, precision=precision)
    return rearrange(found, "... (p i) j -> ... p i j", p=x.shape[-3])


@jax.custom_jvp
def unit_inverse(lower: Array) -> Array:
    """Return the inverse of `I + lower`.

    `lower` is `(r, t, t)` with t a power of 2, and 0 on the diagonal and above it. The inverse is
    made by halves: that of `[[A, 0], [C, B]]` is `[[A', 0], [-B' C A', B']]`.
    `jax.lax.linalg.triangular_solve` of many matrices can wait for ever on a CPU with few cores: in
    JAX 0.10 a call holds a thread of the pool that its parts wait for.

    Example:
        >>> unit_inverse(jnp.array([[[0.0, 0.0], [3.0, 0.0]]]))[0]
        Array([[ 1.,  0.],
               [-3.,  1.]], dtype=float32)
    """
    found = jnp.ones((*lower.shape[:2], 1, 1), lower.dtype)
    while found.shape[1] > 1:
        i = 2 * found.shape[-1]
        blocks = rearrange(lower, "r (m i) (l j) -> r i j m l", i=i, j=i)
        blocks = jnp.moveaxis(jnp.diagonal(blocks, axis1=-2, axis2=-1), -1, 1)
        first, last = rearrange(found, "r (m two) i j -> two r m i j", two=2)
        low = -_product(_product(last, blocks[..., i // 2 :, : i // 2]), first)
        found = _stack_lower(first, low, last)
    return found[:, 0]


@unit_inverse.defjvp
def _differentiate(primals, tangents):
    found = unit_inverse(*primals)
    return found, -_product(_product(found, tangents[0]), found)


def _product(x: Array, y: Array) -> Array:
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def _stack_lower(first: Array, low: Array, last: Array) -> Array:
    upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([low, last], axis=-1)], axis=-2)
