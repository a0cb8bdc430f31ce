import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import dot_product_attention

LOW = [jnp.bfloat16, jnp.float16]


@nnx.jit
def call(module, inputs):
    return module(*inputs)


def loss(module, inputs):
    return jnp.square(module(*inputs)).sum()


def gradients(module, inputs):
    """Return the gradients of parameters and inputs as shapes and dtypes."""
    return nnx.eval_shape(nnx.grad(loss, argnums=(0, 1)), module, inputs)


def dtypes(tree):
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


def parameters(module):
    return nnx.state(module, nnx.Param)


def trace(module, inputs, function=loss):
    graphdef, state = nnx.split(module)
    return jax.make_jaxpr(lambda s, i: function(nnx.merge(graphdef, s), i))(state, inputs)


def floats(equations, jaxpr):
    """Return the floating dtypes of everything that is computed, constants and inputs included."""
    avals = [v.aval for e in equations(jaxpr.jaxpr) for v in (*e.invars, *e.outvars)]
    avals += [v.aval for v in (*jaxpr.jaxpr.invars, *jaxpr.jaxpr.constvars, *jaxpr.jaxpr.outvars)]
    return {aval.dtype.name for aval in avals if jnp.issubdtype(aval.dtype, jnp.floating)}


def computes_in(equations, jaxpr, names):
    return {
        e.invars[0].aval.dtype.name for e in equations(jaxpr.jaxpr) if e.primitive.name in names
    }


@pytest.mark.parametrize("dtype", LOW, ids=["bfloat16", "float16"])
def test_low_compute_with_float32_parameters(learning, dtype):
    module, inputs = learning.build(dtype=dtype), learning.inputs(dtype)
    grads, felt = gradients(module, inputs)
    assert jax.eval_shape(module, *inputs).dtype == dtype
    assert dtypes(parameters(module)) == dtypes(grads) == {"float32"}
    assert dtypes(felt) == {jnp.dtype(dtype).name}


def test_low_compute_is_near_and_not_equal(typical):
    inputs = typical.inputs(jnp.bfloat16)
    expected = call(typical.build(), [x.astype(jnp.float32) for x in inputs])
    error = np.abs(
        call(typical.build(dtype=jnp.bfloat16), inputs).astype(jnp.float32) - expected
    ).max()
    assert 0 < error < 40 * 2.0**-8 * (1 + np.abs(expected).max())


def test_dtype_is_that_of_the_computation_whatever_comes_in(learning):
    module, inputs = learning.build(dtype=jnp.bfloat16), learning.inputs(jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        assert jax.eval_shape(module, *inputs).dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", LOW, ids=["bfloat16", "float16"])
def test_low_parameters_and_inputs(learning, dtype):
    module, inputs = learning.build(param_dtype=dtype), learning.inputs(dtype)
    grads, felt = gradients(module, inputs)
    assert jax.eval_shape(module, *inputs).dtype == dtype
    assert dtypes(parameters(module)) == dtypes(grads) == dtypes(felt) == {jnp.dtype(dtype).name}


@pytest.mark.parametrize(
    ("params", "inputs", "result"),
    [(jnp.float32, jnp.bfloat16, jnp.float32), (jnp.bfloat16, jnp.float32, jnp.float32)],
    ids=["float32_params", "bfloat16_params"],
)
def test_without_dtype_it_is_that_of_input_and_parameters_together(
    learning, params, inputs, result
):
    with jax.numpy_dtype_promotion("standard"):
        output = jax.eval_shape(learning.build(param_dtype=params), *learning.inputs(inputs))
    assert output.dtype == result


@pytest.mark.parametrize("dtype", [jnp.float32, *LOW], ids=["float32", "bfloat16", "float16"])
def test_without_parameters_the_input_decides(variants, dtype):
    simplified = variants["simplified"]
    assert jax.eval_shape(simplified.build(), *simplified.inputs(dtype)).dtype == dtype


@pytest.fixture
def without_library(monkeypatch):
    """Without the kernels in C++, what is computed can be read from the trace."""
    for module in (
        "flax_attn.backends.native",
        "flax_attn.native.product",
        "flax_attn.native.grouped",
    ):
        monkeypatch.setattr(f"{module}.library", lambda: None)


@pytest.mark.parametrize("dtype", LOW, ids=["bfloat16", "float16"])
def test_softmax_statistics_and_activations_are_in_float32(
    variant, equations, without_library, dtype
):
    jaxpr = trace(variant.build(param_dtype=dtype), variant.inputs(dtype))
    names = {"exp", "rsqrt", "tanh", "erf", "erfc", "reduce_max"}
    assert computes_in(equations, jaxpr, names) == {"float32"}


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_float64_is_kept_from_end_to_end(variant, equations, x64, dropout, gradient):
    function = nnx.grad(loss, argnums=(0, 1)) if gradient else call
    module = variant.build(param_dtype=jnp.float64, dropout=dropout)
    jaxpr = trace(module, variant.inputs(jnp.float64), function)
    assert floats(equations, jaxpr) == {"float64"}
    assert not any(v.aval.weak_type for v in jaxpr.jaxpr.outvars)


def test_float32_stays_float32_with_x64_on(variant, x64):
    module, inputs = variant.build(param_dtype=jnp.float32), variant.inputs(jnp.float32)
    output = jax.eval_shape(module, *inputs)
    assert (output.dtype, output.weak_type) == (jnp.float32, False)
    assert dtypes(parameters(module)) <= {"float32"}


def test_everything_is_float32_without_x64(variant, equations):
    jaxpr = trace(variant.build(), variant.inputs(), nnx.grad(loss, argnums=(0, 1)))
    assert floats(equations, jaxpr) == {"float32"}


@pytest.mark.parametrize("precision", [None, jax.lax.Precision.HIGHEST])
def test_precision_reaches_every_product(variant, equations, without_library, precision):
    precision = precision if variant.takes("precision") else None
    jaxpr = trace(variant.build(precision=precision), variant.inputs())
    seen = {
        e.params["precision"] for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"
    }
    assert seen <= {precision and (precision, precision)}
    assert bool(seen) is ("norm" not in variant.name)


def test_large_float16_scores_do_not_overflow(close):
    query = jnp.full((1, 3, 2, 8), 200, jnp.float16)  # products of 320000
    value = jnp.arange(3 * 2 * 8, dtype=jnp.float16).reshape(1, 3, 2, 8)
    output = dot_product_attention(query, query, value)
    assert output.dtype == jnp.float16
    close(output, jnp.broadcast_to(value.mean(axis=1, keepdims=True), value.shape))
