"""Compare the grouped matrix product, at each instruction level, with one product per group."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn.modules.grouped_product import grouped_product
from flax_attn.native import choose_level, grouped, levels, library
from flax_attn.parity.tolerance import LOW_FORWARD, lower_dtype, reordered

pytestmark = pytest.mark.skipif(library() is None, reason="the library was not built")

DTYPES = ("float32", "bfloat16", "float16")
# Rows, widths and the rows of each group: one below and above the few rows, tiles, tasks and blocks
# of the levels.
SIZES = [
    (1, 1, 1, (0, 1, 0)),
    (1, 5, 3, (0, 0, 0)),
    (14, 7, 9, (3, 0, 8)),
    (30, 33, 31, (0, 9, 17)),
    (2, 257, 127, (1, 0, 1)),
    (16, 129, 257, (7, 9, 0)),
    (70, 255, 129, (63, 0, 1)),
    (150, 16, 32, (65, 64, 21)),
    (300, 65, 33, (257, 0, 40)),
]


@pytest.fixture
def every_level():
    yield levels()
    choose_level(levels()[0])


def arrays(m, d_in, d_out, groups, dtype="float32"):
    rng = np.random.default_rng(m + d_in + d_out)
    shapes = (m, d_in), (groups, d_in, d_out), (m, d_out)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def each_alone(rows, matrices, sizes):
    """Return the product of each group alone; sizes are Python's integers."""
    ends = np.cumsum(sizes)
    parts = [
        rows[end - size : end] @ matrix
        for end, size, matrix in zip(ends, sizes, matrices, strict=True)
    ]
    return jnp.concatenate(
        [*parts, jnp.zeros((len(rows) - ends[-1], matrices.shape[2]), rows.dtype)]
    )


def both(product, rows, matrices, cotangent):
    value, pull = jax.vjp(product, rows, matrices)
    return {"product": value, **dict(zip(("rows", "matrices"), pull(cotangent), strict=True))}


def check(ours, reference):
    ours, reference = (
        {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(tree))}
        for tree in (ours, reference)
    )
    assert max(reordered(ours, reference).values()) <= 1


def check_rounded(ours, reference, dtype):
    """Check results in a lower dtype, whose sums are in float32, so that they are rounded once."""
    rounded = {name: array.astype(dtype) for name, array in reference.items()}
    ours, theirs, exact = (
        {name: np.asarray(array, np.float64) for name, array in arrays.items()}
        for arrays in (ours, rounded, reference)
    )
    errors = lower_dtype(ours, [theirs], exact, LOW_FORWARD, float(jnp.finfo(dtype).eps))
    assert max(errors.values()) <= 1, errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_product_and_gradients_are_those_of_each_group_alone(sizes, dtype, every_level):
    *shape, of_group = sizes
    given = arrays(*shape, len(of_group), dtype)
    with jax.default_matmul_precision("highest"):
        wide = (array.astype(jnp.float32) for array in given)
        reference = both(lambda rows, matrices: each_alone(rows, matrices, of_group), *wide)
    for level in every_level:
        choose_level(level)
        found = both(lambda *factors: grouped.grouped(*factors, jnp.array(of_group)), *given)
        if dtype == "float32":
            check(found, reference)
        else:
            check_rounded(found, reference, dtype)


@pytest.mark.parametrize("rows", [3, 40])
def test_a_number_that_is_not_finite_stays_in_its_row_and_its_group(rows, every_level):
    x, matrices, _ = arrays(2 * rows, 20, 37, 2)
    x, matrices = x.at[1, 5].set(jnp.nan), matrices.at[1, 3, 36].set(jnp.inf)
    for level in every_level:
        choose_level(level)
        found = np.asarray(grouped.grouped(x, matrices, jnp.array([rows, rows])))
        assert np.flatnonzero(np.isnan(found).any(axis=1)).tolist() == [1]
        assert np.argwhere(np.isinf(found)).tolist() == [[i, 36] for i in range(rows, 2 * rows)]


def test_derivatives_of_every_order_are_those_of_jax():
    rows, matrices, _ = arrays(7, 5, 4, 3)

    def derivatives(product):
        def loss(*factors):
            return jnp.sin(product(*factors)).sum()

        tangents = jax.tree.map(jnp.cos, (rows, matrices))
        one_factor = jax.jvp(lambda own: product(rows, own), (matrices,), tangents[1:])
        hessian = jax.jacrev(jax.jacrev(loss, (0, 1)), (0, 1))(rows, matrices)
        return jax.jvp(jax.grad(loss, (0, 1)), (rows, matrices), tangents), one_factor, hessian

    ours = jax.jit(
        lambda: derivatives(lambda *factors: grouped_product(*factors, jnp.array([2, 0, 4])))
    )()
    check(ours, derivatives(lambda *factors: each_alone(*factors, (2, 0, 4))))


@pytest.mark.parametrize("axes", [(None, None, 0), (0, None, 0), (1, 0, None)])
def test_is_mapped_over_rows_matrices_and_sizes(axes):
    rows, matrices, _ = arrays(7, 5, 4, 2)
    sizes = jnp.array([[3, 4], [6, 0]])
    rows, matrices, sizes = (
        x if axis is None else jnp.moveaxis(x if x is sizes else jnp.stack([x, 2 * x]), 0, axis)
        for x, axis in zip((rows, matrices, sizes if axes[2] == 0 else sizes[0]), axes, strict=True)
    )
    found = jax.vmap(grouped_product, axes)(rows, matrices, sizes)
    for i, one in enumerate(found):
        given = (
            x if axis is None else jnp.take(x, i, axis)
            for x, axis in zip((rows, matrices, sizes), axes, strict=True)
        )
        own, kernels, counts = given
        check(one, each_alone(own, kernels, [int(count) for count in counts]))


def computed_natively(rows, matrices, **options):
    traced = jax.make_jaxpr(partial(grouped_product, **options))(rows, matrices, jnp.array([1, 2]))
    return "native_grouped_product" in {equation.primitive.name for equation in traced.eqns}


@pytest.mark.parametrize(
    ("dtype", "options", "natively"),
    [
        ("float32", {}, True),
        ("bfloat16", {"precision": "highest"}, True),
        ("float16", {}, True),
        ("float32", {"precision": "BF16_BF16_F32"}, False),
    ],
)
def test_what_is_computed_natively(dtype, options, natively):
    rows, matrices, _ = arrays(3, 6, 5, 2, dtype)
    assert computed_natively(rows, matrices, **options) is natively


@pytest.mark.usefixtures("x64")
def test_float64_is_left_to_the_loop():
    assert not computed_natively(*arrays(3, 6, 5, 2, "float64")[:2])


def test_without_the_library_it_is_the_loop(monkeypatch):
    monkeypatch.setattr(grouped, "library", lambda: None)
    assert not computed_natively(*arrays(3, 6, 5, 2)[:2])


def test_is_exported_to_other_platforms_as_that_of_jax():
    product = jax.jit(
        lambda *given: jax.value_and_grad(
            lambda *own: grouped.grouped(*own, given[2]).sum(), (0, 1)
        )(*given[:2])
    )
    exported = jax.export.export(product, platforms=("tpu",))(
        *arrays(3, 6, 5, 2)[:2], jnp.array([1, 2])
    )
    assert "ragged_dot" in exported.mlir_module()
