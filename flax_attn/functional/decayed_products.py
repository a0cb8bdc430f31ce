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
    # One decay for all features leaves the sum over them: it is a factor of each product.
    one = jnp.ones_like(decay)
    weights, before, after = _by_halves(one[:, None], one, decay, precision)
    return Pairs(weights * _rows_with_columns(x, y, precision), before, after)


def _by_halves(x: Array, y: Array, decay: Array, precision: PrecisionLike) -> Pairs:
    """Return the pairs of blocks of 1 token, then of 2, 4, ... until there is one block.

    Two tokens meet at the border of their halves: the decays on either side of it are sums of
    logarithms, and at most 1. A difference of sums from the start would lose its digits where the
    decay is strong.
    """
    blocks = _single_tokens(x, y, decay)
    while blocks.products.shape[1] > 1:
        blocks = _joined(blocks, x, y, precision)
    return Pairs(*(array[:, 0] for array in blocks))


def _single_tokens(x: Array, y: Array, decay: Array) -> Pairs:
    """Return the pairs of blocks of 1 token; the blocks are the second axis."""
    products = (x * y[:, None]).sum(-1)
    products = rearrange(products, "r p m -> r m p 1 1")
    before = decay[:, :, None]
    return Pairs(products, before, after=jnp.zeros_like(before))


def _joined(blocks: Pairs, x: Array, y: Array, precision: PrecisionLike) -> Pairs:
    """Return the pairs of blocks twice as large, each of two that are neighbours."""
    first, last = _in_two(blocks.products)
    before_first, before_last = _in_two(blocks.before)
    after_first, after_last = _in_two(blocks.after)
    low = _across(x, y, before_last, after_first, precision)
    products = _stack_lower(first, low, last)
    # Sums up to a token of the last half pass all of the first, and the reverse.
    all_of_last = before_last[:, :, -1:]
    before_last = before_last + before_first[:, :, -1:]
    before = jnp.concatenate([before_first, before_last], axis=2)
    after_first = after_first + all_of_last
    after = jnp.concatenate([after_first, after_last], axis=2)
    return Pairs(products, before, after)


def _across(x: Array, y: Array, before: Array, after: Array, precision: PrecisionLike) -> Array:
    """Return the products between halves of blocks: from the first half to the border, and on."""
    size = before.shape[2]
    rows = rearrange(x, "r p (m two s) h -> two r m p s h", two=2, s=size)[1]
    rows = rows * jnp.exp(before)[:, :, None]
    columns = rearrange(y, "r (m two s) h -> two r m s h", two=2, s=size)[0]
    return _rows_with_columns(rows, columns * jnp.exp(after), precision)


def _in_two(blocks: Array) -> Array:
    """Return the first and the last of every two blocks `(r, m, ...)`."""
    return rearrange(blocks, "r (m two) ... -> two r m ...", two=2)


def _rows_with_columns(x: Array, y: Array, precision: PrecisionLike) -> Array:
    """Return the products of `(..., p, i, h)` and `(..., j, h)`, `(..., p, i, j)`."""
    rows = rearrange(x, "... p i h -> ... (p i) h")
    products = jnp.matmul(rows, y.mT, precision=precision)
    return rearrange(products, "... (p i) j -> ... p i j", p=x.shape[-3])


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
    inverse = jnp.ones((*lower.shape[:2], 1, 1), lower.dtype)
    while inverse.shape[1] > 1:
        inverse = _joined_inverse(inverse, lower)
    return inverse[:, 0]


def _joined_inverse(inverse: Array, lower: Array) -> Array:
    """Return the inverses of blocks twice as large."""
    half = inverse.shape[-1]
    blocks = _diagonal_blocks(lower, 2 * half)
    corners = blocks[..., half:, :half]
    first, last = _in_two(inverse)
    low = -_product(_product(last, corners), first)
    return _stack_lower(first, low, last)


def _diagonal_blocks(matrices: Array, size: int) -> Array:
    """Return the blocks of `size` rows and columns on the diagonal, `(r, m, size, size)`."""
    blocks = rearrange(matrices, "r (m i) (l j) -> r i j m l", i=size, j=size)
    blocks = jnp.diagonal(blocks, axis1=-2, axis2=-1)
    return jnp.moveaxis(blocks, -1, 1)


@unit_inverse.defjvp
def _differentiate(primals, tangents):
    inverse = unit_inverse(*primals)
    change = _product(_product(inverse, tangents[0]), inverse)
    return inverse, -change


def _product(x: Array, y: Array) -> Array:
    # Errors of an inverse grow with the number of tokens.
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def _stack_lower(first: Array, low: Array, last: Array) -> Array:
    """Return `[[first, 0], [low, last]]`."""
    upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    lower = jnp.concatenate([low, last], axis=-1)
    return jnp.concatenate([upper, lower], axis=-2)
