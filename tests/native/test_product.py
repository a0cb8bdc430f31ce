"""The product of a few rows with a matrix, at every instruction level, beside that of JAX."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn.modules.matrix_product import dot_general
from flax_attn.native import choose_level, levels, library
from flax_attn.native import product as native
from flax_attn.parity.tolerance import reordered

pytestmark = pytest.mark.skipif(library() is None, reason="the library was not built")

DTYPES = ("float32", "bfloat16", "float16")
# One below and above the rows, pairs, strips, depths and pages of the levels.
SIZES = [
    (1, 1, 1),
    (2, 3, 5),
    (3, 7, 9),
    (4, 8, 8),
    (5, 9, 15),
    (6, 15, 17),
    (7, 17, 31),
    (8, 16, 32),
    (9, 31, 33),
    (15, 33, 63),
    (16, 32, 65),
    (1, 257, 127),
    (3, 64, 1023),
    (2, 65, 1025),
    (1, 48, 2047),
    (4, 40, 2049),
    (7, 70, 130),
]


@pytest.fixture
def every_level():
    yield levels()
    choose_level(levels()[0])


def arrays(m, d_in, d_out, contracted, dtype="float32"):
    rng = np.random.default_rng(m + d_in + d_out)
    matrix = rng.normal(size=(d_in, d_out) if contracted == 0 else (d_out, d_in))
    return jnp.asarray(rng.normal(size=(m, d_in)), dtype), jnp.asarray(matrix, dtype)


def plain(x, matrix, contracted, dtype=None):
    numbers = ((x.ndim - 1,), (contracted,)), ((), ())
    return jax.lax.dot_general(
        x, matrix, numbers, precision="highest", preferred_element_type=dtype
    )


def check(ours, reference):
    ours, reference = (
        {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(tree))}
        for tree in (ours, reference)
    )
    assert max(reordered(ours, reference).values()) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("contracted", [0, 1])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_is_that_of_jax(sizes, contracted, dtype, every_level):
    x, matrix = arrays(*sizes, contracted, dtype)
    reference = plain(*(array.astype(jnp.float32) for array in (x, matrix)), contracted)
    for level in every_level:
        choose_level(level)
        found = native.product(x, matrix, contracted, preferred_element_type=jnp.float32)
        check(found, reference)
        np.testing.assert_array_equal(native.product(x, matrix, contracted), found.astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("contracted", [0, 1])
@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, 6e-8, 3e-5], ids=str)
def test_special_numbers_are_those_of_the_formula(value, contracted, dtype, every_level):
    x, matrix = arrays(3, 40, 37, contracted, dtype)
    x, matrix = x.at[1, 5].set(0), matrix.at[(5, 36) if contracted == 0 else (36, 5)].set(value)
    reference = plain(*(array.astype(jnp.float32) for array in (x, matrix)), contracted)
    for level in every_level:
        choose_level(level)
        found = native.product(x, matrix, contracted, preferred_element_type=jnp.float32)
        check(found, reference)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_a_lower_dtype_is_read_as_it_is(dtype, every_level):
    bits = np.arange(2**16, dtype=np.uint16)
    matrix = jax.lax.bitcast_convert_type(
        jnp.asarray(bits), "bfloat16" if dtype == "float32" else dtype
    )
    wide = np.asarray(matrix.astype(jnp.float32))
    # XLA takes subnormal float32 as zero.
    normal = ~((np.abs(wide) < np.finfo(np.float32).tiny) & (wide != 0))
    matrix = matrix.astype(dtype)
    for level in every_level:
        choose_level(level)
        for table, contracted in ((matrix[None], 0), (matrix[:, None], 1)):
            found = native.product(
                jnp.ones((1, 1), dtype), table, contracted, preferred_element_type=jnp.float32
            )
            np.testing.assert_array_equal(np.asarray(found[0])[normal], wide[normal])


@pytest.mark.parametrize("contracted", [0, 1])
def test_derivatives_of_every_order_are_those_of_jax(contracted):
    operands = arrays(3, 6, 5, contracted)

    def derivatives(multiply):
        def loss(*operands):
            return jnp.sin(multiply(*operands, contracted)).sum()

        tangents = jax.tree.map(jnp.cos, operands)
        gradient = jax.grad(loss, (0, 1))
        second = jax.jvp(gradient, operands, tangents)
        one_factor = jax.jvp(
            lambda x: multiply(x, operands[1], contracted), operands[:1], tangents[:1]
        )
        hessian = jax.jacrev(jax.jacfwd(loss))(*operands)
        transposed = jax.linear_transpose(
            lambda x: multiply(x, operands[1], contracted), operands[0]
        )
        return second, one_factor, hessian, transposed(jnp.ones((3, 5)))

    check(jax.jit(partial(derivatives, native.product))(), derivatives(plain))


@pytest.mark.parametrize("contracted", [0, 1])
@pytest.mark.parametrize("axes", [(0, None), (1, None), (None, 0), (0, 1)])
@pytest.mark.parametrize("size", [0, 2, 9])
def test_is_mapped_over_rows_and_matrices(size, axes, contracted):
    def batch(array, axis):
        grown = jnp.stack([array + i for i in range(size)]) if size else array[None][:0]
        return array if axis is None else jnp.moveaxis(grown, 0, axis)

    operands = [
        batch(array, axis) for array, axis in zip(arrays(2, 7, 5, contracted), axes, strict=True)
    ]
    found, reference = (
        jax.vmap(partial(multiply, contracted=contracted), axes)(*operands)
        for multiply in (native.product, plain)
    )
    assert found.shape == reference.shape == (size, 2, 5)
    if size:
        check(found, reference)


def primitives(x, matrix, **options):
    traced = jax.make_jaxpr(
        lambda *ab: dot_general(*ab, (((x.ndim - 1,), (0,)), ((), ())), **options)
    )(x, matrix)
    return {equation.primitive.name for equation in traced.eqns} & {"native_product", "dot_general"}


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "natively"),
    [
        ((6,), "float32", {}, True),
        ((2, 8, 6), "bfloat16", {"precision": "highest"}, True),
        ((16, 6), "float16", {"preferred_element_type": jnp.float32, "out_sharding": None}, True),
        (
            (16, 6),
            "float32",
            {"precision": (jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST)},
            True,
        ),
        ((17, 6), "float32", {}, False),
        ((0, 6), "float32", {}, False),
        ((2, 6), "int32", {}, False),
        ((2, 6), "bfloat16", {"preferred_element_type": jnp.float16}, False),
        ((2, 6), "float32", {"precision": "BF16_BF16_F32"}, False),
        ((2, 6), "float32", {"precision": jax.lax.DotAlgorithmPreset.F32_F32_F32}, False),
    ],
)
def test_what_is_computed_natively(shape, dtype, options, natively):
    x, matrix = jnp.ones(shape, dtype), jnp.ones((shape[-1], 5), dtype)
    assert primitives(x, matrix, **options) == ({"native_product"} if natively else {"dot_general"})


def test_an_algorithm_that_is_the_default_is_respected():
    with jax.default_matmul_precision("BF16_BF16_F32"):
        assert primitives(*arrays(2, 6, 5, 0)) == {"dot_general"}


@pytest.mark.usefixtures("x64")
def test_float64_is_left_to_jax():
    assert primitives(*arrays(2, 6, 5, 0, "float64")) == {"dot_general"}


def test_without_the_library_it_is_that_of_jax(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    assert primitives(*arrays(2, 6, 5, 0)) == {"dot_general"}


def test_is_exported_to_other_platforms_as_that_of_jax():
    multiply = jax.jit(lambda x, matrix: native.product(x, matrix, 0))
    exported = jax.export.export(multiply, platforms=("tpu",))(*arrays(2, 6, 5, 0))
    assert "dot_general" in exported.mlir_module()
