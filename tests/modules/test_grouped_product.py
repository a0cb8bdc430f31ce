"""The tiled product of rows with their group's matrix equals XLA's ragged product.

Gradients are included.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn.modules import grouped_product as file
from flax_attn.modules.grouped_product import grouped_product
from flax_attn.parity import tolerance

pytestmark = pytest.mark.usefixtures("x64")
# The last two leave rows.
SIZES = [(3, 0, 4, 7), (14, 0, 0, 0), (0, 0, 0, 14), (1, 2, 0, 3), (0, 0, 0, 0)]
RANDOM = np.random.default_rng(0)
ROWS, MATRICES, COTANGENT = (RANDOM.normal(size=size) for size in ((14, 6), (4, 6, 5), (14, 5)))


def both(sizes, product):
    """Return the product, and its gradients under a random cotangent."""
    value, pull = jax.vjp(
        lambda rows, matrices: product(rows, matrices, sizes), *map(jnp.asarray, (ROWS, MATRICES))
    )
    names = ("product", "rows", "matrices")
    return dict(zip(names, (value, *pull(jnp.asarray(COTANGENT))), strict=True))


def as_numpy(arrays):
    return {name: np.asarray(array) for name, array in arrays.items()}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_tiles_are_the_ragged_product(sizes):
    sizes = jnp.array(sizes, jnp.int32)
    assert file.tiled(jnp.asarray(ROWS))
    products = grouped_product, jax.lax.ragged_dot
    found, reference = (
        as_numpy(jax.jit(lambda s, product=product: both(s, product))(sizes))
        for product in products
    )
    errors = tolerance.relative(found, reference, scale=1.0)
    assert max(errors.values()) <= tolerance.FORWARD, errors


def test_each_group_alone_in_large_tiles(monkeypatch):
    monkeypatch.setattr(file, "_LARGEST", 2)
    sizes = jnp.array([5, 0, 8, 1], jnp.int32)
    groups = np.repeat(np.arange(4), sizes)
    reference = np.einsum("mi,mio->mo", ROWS, MATRICES[groups])
    errors = tolerance.relative(
        {"product": np.asarray(both(sizes, grouped_product)["product"])}, {"product": reference}
    )
    assert max(errors.values()) <= tolerance.FORWARD, errors


def test_a_number_that_is_not_finite_stays_in_its_row():
    rows = jnp.asarray(ROWS).at[4].set(jnp.nan)
    found = grouped_product(rows, jnp.asarray(MATRICES), jnp.array([5, 4, 5, 0], jnp.int32))
    assert np.flatnonzero(np.isnan(found).any(axis=1)).tolist() == [4]


def test_one_product_of_many_sequences():
    sizes = jnp.array([[3, 4, 0, 7], [14, 0, 0, 0]], jnp.int32)
    found = jax.vmap(lambda s: grouped_product(jnp.asarray(ROWS), jnp.asarray(MATRICES), s))(sizes)
    for one, size in zip(found, sizes, strict=True):
        reference = both(size, jax.lax.ragged_dot)["product"]
        errors = tolerance.relative(
            {"product": np.asarray(one)}, {"product": np.asarray(reference)}
        )
        assert max(errors.values()) <= tolerance.FORWARD, errors
