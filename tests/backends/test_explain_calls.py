"""Which backend each attention call of a program takes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_attn import GPT2, GPT2Config, Mask, MultiHeadAttention, dot_product_attention, explain
from flax_attn.sharding.explain_calls import explain_calls
from flax_attn.training import train_step

CONFIG = GPT2Config(d_model=16, num_heads=2, num_layers=3, context_length=8, vocab_size=11)
TOKENS = jax.ShapeDtypeStruct((5, 8), jnp.int32)


def model(**options):
    return GPT2(CONFIG, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("platform", [None, "cpu", "h100", "v5e"])
def test_each_layer_is_explained_as_its_call_is(platform):
    abstract = nnx.eval_shape(model)
    abstract.eval()
    found = explain_calls(abstract, TOKENS, platform=platform)
    x = jax.ShapeDtypeStruct((5, 8, 2, 8), jnp.float32)
    expected = explain(x, x, x, mask=Mask.causal(), platform=platform)
    assert [call.explanation for call in found] == [expected] * 3
    line = f"{expected.backend}: query (5, 8, 2, 8), key (5, 8, 2, 8), float32, {found[0].mask}"
    assert str(found) == f"3 x {line}"


def test_options_and_layers_that_differ_have_a_line_each():
    layers = model()
    layers.trf_blocks[1].eval()
    lines = str(explain_calls(layers, np.zeros((5, 8), np.int32))).splitlines()
    assert [line[:3] for line in lines] == ["2 x", "1 x"]
    assert [line.endswith(", dropout") for line in lines] == [True, False]


def test_a_backend_that_is_named_and_refuses_is_nothing():
    layer = MultiHeadAttention(16, 16, num_heads=2, backend="splash", rngs=nnx.Rngs(0))
    (call,) = explain_calls(layer, jnp.ones((5, 8, 16)))
    assert call.explanation.backend is None
    assert str(call).startswith("nothing: query")


@pytest.mark.parametrize("compiled", [jax.jit, nnx.jit], ids=["jax", "nnx"])
@pytest.mark.usefixtures("no_shape_checks")
def test_what_is_compiled_inside_is_traced_for_the_question_alone(compiled):
    @compiled
    def attend(x):
        return dot_product_attention(x, x, x)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 2, 4)), jnp.float32)
    # Traces are kept: of a question none may reach a run, and of a run none a question.
    assert len(explain_calls(attend, x)) == 1
    expected = dot_product_attention(x, x, x)
    np.testing.assert_allclose(attend(x), expected, rtol=1e-6)
    assert len(explain_calls(attend, x, platform="v5e")) == 1
    np.testing.assert_allclose(attend(x), expected, rtol=1e-6)


def test_a_step_of_training_and_a_method_are_explained():
    trained = model()
    optimizer = nnx.Optimizer(trained, optax.adamw(1e-3), wrt=nnx.Param)
    before = nnx.state(trained)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer count
        assert len(explain_calls(train_step, trained, optimizer, jnp.ones((5, 8), jnp.int32))) == 3
    assert len(explain_calls(trained.attend, TOKENS)) == 3
    jax.tree.map(np.testing.assert_array_equal, _numbers(before), _numbers(nnx.state(trained)))


def _is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _numbers(state):
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, state)


def test_a_function_without_attention_has_no_calls():
    assert explain_calls(jnp.sin, 3.0) == ()


def test_an_unknown_platform_is_refused():
    with pytest.raises(ValueError, match=r"platform must be .*got 'h1000'"):
        explain_calls(jnp.sin, 3.0, platform="h1000")
