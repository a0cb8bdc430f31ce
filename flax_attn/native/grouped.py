"""The product of rows with the matrix of their group, which copies no matrix, and its derivatives.

It is a primitive of three forms, each linear in either factor, of which the gradients are again one
of the forms.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching
from jaxtyping import Array

from flax_attn.native import DTYPES, library, target
from flax_attn.native.primitive import primitive
from flax_attn.native.product import is_algorithm

# As in calls.h.
_PLAIN, _TRANSPOSED, _OUTER = range(3)
# The outer form sums over the rows of each group.
_OF_ROWS = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
# The forms of the gradients of the left and the right factor, and whether the cotangent is their
# left factor.
_GRADIENTS = {
    _PLAIN: ((_TRANSPOSED, True), (_OUTER, False)),
    _TRANSPOSED: ((_PLAIN, True), (_OUTER, True)),
    _OUTER: ((_TRANSPOSED, False), (_PLAIN, False)),
}


def takes(rows: Array, matrices: Array, precision: Any = None) -> bool:
    """Return whether `grouped` computes the product, with sums in float32 as in `product.takes`."""
    same = rows.dtype == matrices.dtype and rows.dtype.name in DTYPES
    return (
        same
        and rows.size > 0
        and matrices.size > 0
        and library() is not None
        and not is_algorithm(precision)
    )


def grouped(rows: Array, matrices: Array, sizes: Array) -> Array:
    """Return the product of each row with the matrix of its group; rows of no group give zeros.

    Shapes:
        `(m, i)`, `(e, i, o)` and `(e,)` to `(m, o)`.

    Example:
        >>> if library():
        ...     sizes = jnp.array([0, 1, 1, 0])
        ...     assert grouped(jnp.ones((2, 3)), jnp.ones((4, 3, 5)), sizes).shape == (2, 5)
    """
    return _grouped.bind(rows, matrices, sizes.astype(jnp.int32), form=_PLAIN)


def _plain(left: Array, right: Array, sizes: Array, *, form: int) -> Array:
    if form == _OUTER:
        return jax.lax.ragged_dot_general(left, right, sizes, _OF_ROWS)
    return jax.lax.ragged_dot(left, right if form == _PLAIN else right.swapaxes(1, 2), sizes)


def _call(left: Array, right: Array, sizes: Array, *, form: int) -> Array:
    result = jax.eval_shape(partial(_plain, form=form), left, right, sizes)
    return jax.ffi.ffi_call(target("grouped_product"), result)(left, right, sizes, form=form)


def _jvp(primals, tangents, *, form):
    left, right, sizes = primals
    d_left, d_right, _ = tangents
    multiply = partial(_grouped.bind, form=form)
    # A factor that does not change would be multiplied as zeros.
    changes = []
    if type(d_left) is not ad.Zero:
        changes.append(multiply(d_left, right, sizes))
    if type(d_right) is not ad.Zero:
        changes.append(multiply(left, d_right, sizes))
    change, *others = changes
    return multiply(left, right, sizes), sum(others, change)


def _transpose(cotangent, left, right, sizes, *, form):
    i = 0 if ad.is_undefined_primal(left) else 1
    own, first = _GRADIENTS[form][i]
    pair = ad.instantiate_zeros(cotangent), (right, left)[i]
    gradient = _grouped.bind(*(pair if first else pair[::-1]), sizes, form=own)
    return [gradient if j == i else None for j in range(3)]


def _batch(factors, dims, *, form):
    # One after the other: the groups of each have sizes of their own.
    mapped = {}
    for i, dim in enumerate(dims):
        if dim is not None:
            mapped[i] = jnp.moveaxis(factors[i], dim, 0)

    def one(own):
        own_factors = [own.get(i, factor) for i, factor in enumerate(factors)]
        return _grouped.bind(*own_factors, form=form)

    return jax.lax.map(one, mapped), 0


_grouped = primitive("native_grouped_product", _call, _plain, ("form",))
ad.primitive_jvps[_grouped] = _jvp
ad.primitive_transposes[_grouped] = _transpose
batching.primitive_batchers[_grouped] = _batch
