"""The product with held matrices, at every instruction level, beside that of widened ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn.functional.quantized import QuantizedMatrix
from flax_attn.modules.quantized_product import quantized_product, takes
from flax_attn.native import choose_level, levels, library
from flax_attn.parity.tolerance import reordered

pytestmark = pytest.mark.skipif(library() is None, reason="the library was not built")

DTYPES = ("float32", "bfloat16", "float16")
FORMATS = ("int8", "float8_e4m3fn", "uint8")
# (m, d_in, d_out): one below and above the steps, pairs and rows of the levels.
SIZES = [(1, 1, 1), (2, 3, 5), (5, 31, 17), (8, 32, 64), (15, 33, 65), (16, 65, 127), (3, 200, 130)]
BLOCKS = [(1, 1000), (128, 128), (16, 32), (1, 64)]


@pytest.fixture
def every_level():
    yield levels()
    choose_level(levels()[0])


def held(weight, d_out, d_in, block=(1, 32), lead=()):
    """Return a matrix of random numbers, none of them NaN."""
    rng = np.random.default_rng(d_out + d_in)
    blocks = [-(-size // edge) for size, edge in zip((d_out, d_in), block, strict=True)]
    if weight == "uint8":
        numbers = rng.integers(0, 256, (*lead, d_out, d_in // 2), np.uint8)
        scale = rng.integers(110, 140, (*lead, *blocks), np.uint8)
    else:
        numbers = rng.integers(-127, 127, (*lead, d_out, d_in), np.int8)
        numbers = numbers.view(weight) if weight != "int8" else numbers
        scale = rng.uniform(0.5, 2, (*lead, *blocks)).astype(np.float32)
    if weight == "float8_e4m3fn":
        numbers = np.where(np.isnan(numbers.astype(np.float32)), 1, numbers).astype(weight)
    return QuantizedMatrix(jnp.asarray(numbers), jnp.asarray(scale), block, jnp.dtype("float32"))


def check(found, x, matrix):
    """Each of d_in sums rounds once, each product and each scale at most once."""
    wide, matrix = np.asarray(x, np.float64), np.asarray(matrix, np.float64)
    d_in = matrix.shape[-1]
    bound = (d_in + 3) * 2.0**-23 * (np.abs(wide) @ np.abs(matrix.T))
    assert (np.abs(found - wide @ matrix.T) <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("weight", FORMATS)
def test_is_exact_to_rounding(weight, block, dtype, every_level):
    if weight == "uint8":
        sizes = [(m, 32 * -(-d_in // 32), d_out) for m, d_in, d_out in SIZES]
    else:
        sizes = SIZES
    for m, d_in, d_out in sizes:
        x = jnp.asarray(np.random.default_rng(m).normal(size=(m, d_in)), dtype)
        matrix = held(weight, d_out, d_in, block)
        assert takes(x, matrix)
        for level in every_level:
            choose_level(level)
            check(quantized_product(x, matrix), x, matrix.floats())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [(1, 1000), (1, 32), (128, 128)], ids=str)
@pytest.mark.parametrize("weight", FORMATS)
def test_a_row_has_the_same_bits_beside_any_number_of_others(weight, block, dtype, every_level):
    d_in = 416 if weight == "uint8" else 427
    x = jnp.asarray(np.random.default_rng(3).normal(size=(16, d_in)), dtype)
    matrix = held(weight, 23, d_in, block)
    for level in every_level:
        choose_level(level)
        alone = [quantized_product(x[i : i + 1], matrix)[0] for i in range(16)]
        for m in (2, 3, 4, 7, 8, 11, 15, 16):
            found = quantized_product(x[:m], matrix)
            np.testing.assert_array_equal(found, jnp.stack(alone[:m]), level)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight", FORMATS)
@pytest.mark.parametrize(
    "sizes", [(0, 3, 0, 5), (9, 1, 0, 0), (0, 0, 0, 0), (0, 20, 7, 1)], ids=str
)
def test_each_group_has_its_own_rows(sizes, weight, dtype, every_level):
    matrix = held(weight, 37, 64, lead=(4,))
    m = sum(sizes) + 2
    x = jnp.asarray(np.random.default_rng(m).normal(size=(m, 64)), dtype)
    for level in every_level:
        choose_level(level)
        found = quantized_product(x, matrix, jnp.array(sizes))
        start = 0
        for size, own in zip(sizes, matrix.floats(), strict=True):
            check(found[start : start + size], x[start : start + size], own)
            start += size
        assert (found[start:] == 0).all(), level


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 32])
def test_every_number_of_8_bits_is_read_as_it_is(width, dtype, every_level):
    numbers = np.arange(256, dtype=np.uint8).view("float8_e4m3fn")
    weight = jnp.zeros((256, width), numbers.dtype).at[:, 0].set(numbers)
    matrix = QuantizedMatrix(weight, jnp.ones((256, 1)), (1, 32), jnp.dtype("float32"))
    for level in every_level:
        choose_level(level)
        found = quantized_product(jnp.ones((1, width), dtype), matrix)
        np.testing.assert_array_equal(found[0], numbers.astype(np.float32), level)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 1, 30, 31])
def test_every_number_of_4_bits_is_read_as_it_is(place, dtype, every_level):
    weight = jnp.tile(jnp.arange(256, dtype=jnp.uint8)[:, None], 16)
    x = jnp.zeros((1, 32), dtype).at[0, place].set(1)
    scale = jnp.full((256, 1), 128, jnp.uint8).at[7].set(255)
    matrix = QuantizedMatrix(weight, scale, (1, 32), jnp.dtype("float32"))
    for level in every_level:
        choose_level(level)
        found = quantized_product(x, matrix)
        np.testing.assert_array_equal(found[0], matrix.floats()[:, place], level)


@pytest.mark.parametrize("weight", FORMATS)
def test_numbers_that_are_not_finite_reach_their_row_only(weight, every_level):
    x = jnp.ones((4, 64)).at[1, 3].set(jnp.nan).at[2, 5].set(-jnp.inf).at[3, 0].set(1e30)
    one = {"int8": 1, "float8_e4m3fn": 1, "uint8": 0x22}[weight]
    numbers = jnp.full((70, 32 if weight == "uint8" else 64), one).astype(weight)
    scale = jnp.full((70, 2), 127, jnp.uint8) if weight == "uint8" else jnp.ones((70, 2))
    matrix = QuantizedMatrix(numbers, scale, (1, 32), jnp.dtype("float32"))
    for level in every_level:
        choose_level(level)
        found = np.asarray(quantized_product(x, matrix))
        assert (found[0] == 64).all(), level
        assert np.isnan(found[1]).all(), level
        assert (found[2] == -np.inf).all(), level
        assert np.isfinite(found[3]).all(), level


def test_other_blocks_and_dtypes_are_left_to_xla():
    x = jnp.ones((3, 64))
    assert takes(x, held("int8", 5, 64, (1, 32)))
    assert not takes(x, held("int8", 5, 64, (1, 24)))
    assert not takes(x.astype(jnp.int32), held("int8", 5, 64))
    assert not takes(x, held("int8", 5, 64), "BF16_BF16_F32")


@pytest.mark.parametrize("weight", FORMATS)
@pytest.mark.parametrize("sizes", [None, (2, 0, 1)])
def test_the_gradient_of_the_rows_is_that_of_widened_matrices(weight, sizes):
    matrix = held(weight, 7, 64, lead=() if sizes is None else (3,))
    groups = [] if sizes is None else [jnp.array(sizes)]
    x = jax.random.normal(jax.random.key(0), (3, 64))
    numbers = jnp.repeat(jnp.arange(3), jnp.array(sizes)) if sizes else None

    def plain(x):
        floats = matrix.floats()
        return x @ floats.T if sizes is None else jnp.einsum("ti,toi->to", x, floats[numbers])

    def loss(multiply, x):
        return (multiply(x) ** 2).sum()

    found = jax.grad(lambda x: loss(lambda x: quantized_product(x, matrix, *groups), x))(x)
    expected = jax.grad(lambda x: loss(plain, x))(x)
    assert max(reordered({"x": np.asarray(found)}, {"x": np.asarray(expected)}).values()) <= 1
