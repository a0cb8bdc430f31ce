"""Every variant as a layer of a Linen model, through `flax.nnx.bridge`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax.core import meta
from flax.nnx import bridge

RNGS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


class Model(linen.Module):
    """A Linen layer in front, so that there are parameters of both kinds."""

    variant: Any
    dropout: float = 0.0

    @linen.compact
    def __call__(self, *inputs, **options):
        first, *rest = inputs
        first = linen.Dense(first.shape[-1], name="embed")(first)
        return bridge.to_linen(self.variant.construct, dropout=self.dropout, name="layer")(
            first, *rest, **options
        )


def in_eval(module, *inputs):
    module.eval()
    return module(*inputs)


@pytest.fixture(scope="module")
def initialise():
    known = {}

    def start(variant, dropout=0.0):
        model, inputs = Model(variant, dropout), variant.inputs()
        if (variant.name, dropout) not in known:
            known[variant.name, dropout] = model.init(RNGS, *inputs)
        return model, inputs, known[variant.name, dropout]

    return start


def twin(variant, variables, **arguments):
    """Return the NNX module with the weights of the Linen layer."""
    module = variant.create(**arguments)
    # The boxes hold the names of the axes.
    params = meta.unbox(variables["params"].get("layer", {}))
    nnx.update(
        module, nnx.to_pure_dict(nnx.merge_state(nnx.state(module, nnx.Param), nnx.State(params)))
    )
    return module


def embed(variables, inputs):
    first, *rest = inputs
    return [
        linen.Dense(first.shape[-1]).apply({"params": variables["params"]["embed"]}, first),
        *rest,
    ]


def test_parameters_are_those_of_the_module(learning, initialise):
    _, _, variables = initialise(learning)
    params = nnx.to_pure_dict(nnx.state(learning.create(), nnx.Param))
    assert set(variables) == {"params"}
    layer = variables["params"]["layer"]
    assert jax.tree.map(jnp.shape, meta.unbox(layer)) == jax.tree.map(jnp.shape, params)


def test_output_equals_that_of_the_module(variant, initialise, close):
    model, inputs, variables = initialise(variant)
    close(model.apply(variables, *inputs), twin(variant, variables)(*embed(variables, inputs)))


def test_gradients_reach_every_parameter(typical, initialise, close):
    model, inputs, variables = initialise(typical)

    @jax.jit
    @jax.value_and_grad
    def loss(variables):
        return jnp.square(model.apply(variables, *inputs) - 1).sum()

    value, grads = loss(variables)
    close(value, jnp.square(model.apply(variables, *inputs) - 1).sum())
    assert jax.tree.structure(grads) == jax.tree.structure(variables)
    for path, grad in jax.tree_util.tree_leaves_with_path(meta.unbox(grads)):
        felt = [getattr(key, "key", None) for key in path[-2:]] != ["W_key", "bias"]
        assert np.isfinite(grad).all()
        assert not felt or np.abs(grad).max() > 1e-5, path


def test_weights_are_those_of_the_module(weighing, initialise, close):
    model, inputs, variables = initialise(weighing)
    module, options = twin(weighing, variables), {"return_weights": True}
    expected = module.attend(*embed(variables, inputs), **options)
    close(model.apply(variables, *inputs, nnx_method=type(module).attend, **options), expected)


@pytest.fixture
def dropped(typical, initialise):
    model, inputs, variables = initialise(typical, 0.5)
    return typical, model, inputs, variables


def test_dropout_is_decided_by_the_stream(dropped):
    _, model, inputs, variables = dropped
    apply = jax.jit(lambda key: model.apply(variables, *inputs, rngs={"dropout": key}))
    first, same, other = (apply(jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, same)
    assert not (first == other).all()


def test_a_dropout_key_decides_as_in_the_module(dropped, close):
    variant, model, inputs, variables = dropped
    key, module = jax.random.key(5), twin(variant, variables, dropout=0.5)
    actual = model.apply(variables, *inputs, dropout_key=key, rngs={"dropout": jax.random.key(1)})
    close(actual, module(*embed(variables, inputs), dropout_key=key))


def test_eval_mode_is_a_method_of_ones_own(dropped, close):
    variant, model, inputs, variables = dropped
    expected = Model(variant, 0.0).apply(variables, *inputs)
    actual = model.apply(
        variables, *inputs, nnx_method=in_eval, rngs={"dropout": jax.random.key(1)}
    )
    close(actual, expected)
