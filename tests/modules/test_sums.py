"""In lower dtypes each sum over tokens, heads or experts is taken in float32, and rounded once."""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_attn
from flax_attn.functional.parameter_sums import lookup
from flax_attn.proof.build import drawn
from flax_attn.proof.variants import VARIANTS

LOW = ["bfloat16", "float16"]
# One of each kind of parameter that several tokens, heads or experts read.
ROWS = (
    *("multi_head_t5", "multi_head_soft_cap_sinks", "multi_head_differential", "latent_plain"),
    *("gated_delta_net", "kimi_delta_attention", "layer_norm", "feed_forward_exact", "geglu"),
    *("moe_dense", "moe_qwen2", "moe_gpt_oss", "embedding"),
    *("gpt2", "bertmaskedlm", "dinov2", "t5", "whisper"),
)
SELECTED = [row for row in VARIANTS if row.name in ROWS]


def low_sums(equations, jaxpr):
    """Return the sums of more than one term that are taken in a lower dtype."""
    found = []
    for equation in equations(jaxpr.jaxpr):
        name = equation.primitive.name
        if name == "reduce_sum":
            array = equation.invars[0].aval
            terms = prod(array.shape[axis] for axis in equation.params["axes"])
        elif name == "scatter-add":
            array = equation.outvars[0].aval
            terms = 1 if equation.params["unique_indices"] else 2
        else:
            continue
        if terms > 1 and array.dtype.name in LOW:
            found.append(f"{name} of {array.str_short()}")
    return found


@pytest.fixture
def without_library(monkeypatch):
    """Without the kernels in C++, what is computed can be read from the trace."""
    for name in ("backends.native", "native.product", "native.grouped"):
        monkeypatch.setattr(f"flax_attn.{name}.library", lambda: None)


@pytest.mark.parametrize("row", SELECTED, ids=[row.name for row in SELECTED])
def test_gradients_are_summed_in_float32(row, equations, without_library):
    module = drawn(lambda: row.build(flax_attn, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    module.eval()
    arrays = row.draw(np.random.default_rng(0)).values()
    inputs = [jnp.asarray(x, jnp.bfloat16 if x.dtype.kind == "f" else int) for x in arrays]
    graph, parameters, rest = nnx.split(module, nnx.Param, ...)

    def loss(parameters):
        output = nnx.merge(graph, parameters, rest)(*inputs, **row.call(flax_attn))
        return output.astype(jnp.float32).sum()

    # The logits of a router are promoted to float32.
    with jax.numpy_dtype_promotion("standard"):
        gradient = jax.make_jaxpr(jax.grad(loss))(parameters)
    assert not low_sums(equations, gradient)


def test_every_row_that_is_named_is_there():
    assert len(SELECTED) == len(ROWS)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
@pytest.mark.parametrize("shape", [(3, 1, 7), (1, 5, 7), (2, 1, 5, 1)], ids=str)
def test_the_gradient_of_a_broadcast_bias_is_summed_in_float32(equations, backend, shape):
    query, key = jnp.ones((2, 5, 3, 4), jnp.bfloat16), jnp.ones((2, 7, 3, 4), jnp.bfloat16)

    def loss(bias):
        found = flax_attn.dot_product_attention(query, key, key, bias, backend=backend)
        return found.astype(jnp.float32).sum()

    gradient = jax.make_jaxpr(jax.grad(loss))(jnp.ones(shape, jnp.bfloat16))
    assert not low_sums(equations, gradient)


@pytest.mark.parametrize(("dtype", "large"), [(jnp.bfloat16, 256), (jnp.float16, 2048)])
def test_a_bias_is_added_before_the_output_is_rounded(dtype, large):
    layer = flax_attn.Linear(2, 1, param_dtype=dtype, rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.ones((2, 1), dtype)
    layer.bias[...] = jnp.ones(1, dtype)
    # The product, large + 1, is between two numbers of the dtype.
    output = layer(jnp.array([[large, 1]], dtype))
    assert output.dtype == dtype
    assert output.tolist() == [[large + 2]]


def test_on_a_gpu_the_bias_is_left_to_the_kernel_of_the_product(equations, monkeypatch):
    monkeypatch.setattr("flax_attn.modules.linear.platform_of", lambda x: "gpu")
    layer = drawn(lambda: flax_attn.Linear(3, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))

    def loss(layer):
        return layer(jnp.ones((5, 3), jnp.bfloat16)).astype(jnp.float32).sum()

    gradient = jax.make_jaxpr(nnx.grad(loss))(layer)
    products = [e for e in equations(gradient.jaxpr) if e.primitive.name == "dot_general"]
    assert {e.outvars[0].aval.dtype.name for e in products} == {"bfloat16"}
    assert not low_sums(equations, gradient)


@pytest.mark.parametrize("dtype", LOW)
def test_products_of_gradients_stay_in_the_lower_dtype(equations, dtype):
    layer = drawn(lambda: flax_attn.Linear(3, 4, param_dtype=dtype, rngs=nnx.Rngs(0)))
    x = jnp.ones((2, 20, 3), dtype)

    def loss(layer, x):
        return layer(x).astype(jnp.float32).sum()

    def products(argnums):
        gradient = jax.make_jaxpr(nnx.grad(loss, argnums=argnums))(layer, x)
        return [e for e in equations(gradient.jaxpr) if e.primitive.name == "dot_general"]

    # The output, and the gradients of kernel and input; where the input has none, its product is
    # not computed.
    assert [len(products(argnums)) for argnums in ((0, 1), 0)] == [3, 2]
    assert {x.aval.dtype for e in products((0, 1)) for x in e.invars} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("tokens", [1, 20], ids=["native", "xla"])
def test_linear_is_differentiated_in_every_mode(tokens, close):
    layer = drawn(lambda: flax_attn.Linear(3, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    x = jnp.ones((tokens, 3), jnp.bfloat16)

    def second(x):
        return jax.jvp(jax.grad(lambda x: jnp.square(layer(x)).sum()), (x,), (x,))[1]

    ahead = jax.jvp(layer, (x,), (x,))[1]
    assert ahead.dtype == jnp.bfloat16
    close(ahead.astype(jnp.float32), (x @ layer.kernel[...]).astype(jnp.float32))
    assert second(x).shape == x.shape
    assert jax.vmap(layer)(x[None]).tolist() == layer(x)[None].tolist()


def test_a_product_that_was_set_stays():
    layer = flax_attn.Linear(3, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    layer.dot_general = lambda x, kernel, *others, **options: jnp.zeros((2, 4), x.dtype)
    assert layer(jnp.ones((2, 3), jnp.bfloat16)).tolist() == [layer.bias[...].tolist()] * 2


def test_a_lookup_changes_with_the_table_alone():
    table, ids = jnp.ones((2, 1), jnp.bfloat16), jnp.array([0, 5])

    def found(table):
        return lookup(table, ids, mode="fill", fill_value=7)

    assert [x.tolist() for x in jax.jvp(found, (table,), (table,))] == [[[1], [7]], [[1], [0]]]
