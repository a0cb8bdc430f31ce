"""The product of tokens with a matrix equals `jax.lax.dot_general`, in the fastest form on CPU."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import Linear
from flax_attn.modules.matrix_product import dot_general
from flax_attn.native import product as native

SHAPES = [
    (32,),
    (1, 32),
    (1, 1, 32),
    (5, 32),
    (2, 5, 32),
    (2, 1, 3, 32),
    (0, 5, 32),
    (1, 30),
    (1, 1, 30),
]


def dimension_numbers(x, contracted):
    return ((x.ndim - 1,), (contracted,)), ((), ())


def arrays(shape, contracted):
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(shape[-1], 7) if contracted == 0 else (7, shape[-1]))
    return jnp.asarray(rng.normal(size=shape)), jnp.asarray(matrix)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("contracted", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_is_that_of_jax(shape, contracted):
    x, matrix = arrays(shape, contracted)
    numbers = dimension_numbers(x, contracted)
    expected, pull_expected = jax.vjp(lambda *ab: jax.lax.dot_general(*ab, numbers), x, matrix)
    found, pull = jax.vjp(lambda *ab: dot_general(*ab, numbers), x, matrix)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    for gradient, right in zip(pull(jnp.cos(found)), pull_expected(jnp.cos(expected)), strict=True):
        np.testing.assert_allclose(gradient, right, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "dtype", "mesh", "multiplied"),
    [
        ((2, 5, 32), jnp.float32, False, (10, 32)),
        ((1, 1, 32), jnp.float32, False, (16, 1, 2)),
        ((1, 1, 30), jnp.float32, False, (1, 30)),
        ((1, 1, 32), jnp.bfloat16, False, (1, 32)),  # the parts would be rounded
        ((2, 5, 32), jnp.float32, True, (2, 5, 32)),
    ],
)
def test_the_form_that_is_multiplied_without_the_native_library(
    shape, dtype, mesh, multiplied, monkeypatch
):
    monkeypatch.setattr(native, "library", lambda: None)
    x, matrix = (array.astype(dtype) for array in arrays(shape, 0))
    with jax.set_mesh(jax.make_mesh((1,), ("data",))) if mesh else nullcontext():
        traced = jax.make_jaxpr(lambda *ab: dot_general(*ab, dimension_numbers(x, 0)))(x, matrix)
    (product,) = (equation for equation in traced.eqns if equation.primitive.name == "dot_general")
    assert product.invars[0].aval.shape == multiplied


@pytest.mark.usefixtures("no_shape_checks")
def test_a_precision_is_refused_when_a_layer_is_built():
    with pytest.raises(ValueError, match=r"precision must be one that .*; got 'nonsense'"):
        Linear(3, 2, precision="nonsense", rngs=nnx.Rngs(0))
