"""A float32 optimizer over low-precision parameters: its state, and how parameters follow."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_attn import GPT2, GPT2Config
from flax_attn.training import float32_state, train_step

pytestmark = pytest.mark.usefixtures("dtype_promotion")
RANDOM = np.random.default_rng(0)
VALUES = {
    "kernel": RANDOM.normal(size=(5, 7)) * 10.0 ** RANDOM.integers(-2, 3, (5, 7)),
    "scale": RANDOM.normal(size=3),
}
STEPS = 200


def parameters(low):
    return {
        "kernel": jnp.asarray(VALUES["kernel"], low),
        "scale": jnp.asarray(VALUES["scale"], jnp.float32),
    }


def as_float32(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def train(optimizer, params, gradients):
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def gradients_of(params, steps):
    return [
        jax.tree.map(lambda x: jnp.asarray(RANDOM.normal(1, 1, x.shape), x.dtype), params)
        for _ in range(steps)
    ]


@pytest.mark.parametrize("low", [jnp.bfloat16, jnp.float16])
def test_small_steps_add_up_as_in_float32(low):
    optimizer, params = optax.sgd(1e-4, momentum=0.5), parameters(low)
    gradients = gradients_of(params, STEPS)
    found, state = train(float32_state(optimizer), params, gradients)
    truth, _ = train(optimizer, as_float32(params), as_float32(gradients))
    np.testing.assert_array_equal(state.master[0], truth["kernel"])
    np.testing.assert_array_equal(found["kernel"], truth["kernel"].astype(low))
    np.testing.assert_array_equal(found["scale"], truth["scale"])
    assert {name: x.dtype for name, x in found.items()} == {"kernel": low, "scale": jnp.float32}


def test_a_step_that_bfloat16_does_not_feel():
    ones = {"kernel": jnp.ones(4, jnp.bfloat16)}
    gradients = [ones] * STEPS
    assert (train(optax.sgd(1e-4), ones, gradients)[0]["kernel"] == 1).all()
    found, _ = train(float32_state(optax.sgd(1e-4)), ones, gradients)
    np.testing.assert_array_equal(found["kernel"], jnp.full(4, 0.98, jnp.bfloat16))


def test_only_what_is_low_has_a_copy():
    optimizer, params = optax.adamw(0.1), parameters(jnp.bfloat16)
    state = float32_state(optimizer).init(params)
    assert [(x.shape, x.dtype.name) for x in state.master] == [((5, 7), "float32")]
    assert {x.dtype.name for x in jax.tree.leaves(state.inner)} == {"float32", "int32"}
    assert float32_state(optimizer).init(parameters(jnp.float32)).master == ()


def test_compiled_parameters_are_the_copies_rounded():
    params = {"kernel": jnp.asarray(RANDOM.normal(size=20000), jnp.bfloat16)}
    optimizer = float32_state(optax.adamw(0.1))
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient in gradients_of(params, 5):
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(params["kernel"], state.master[0].astype(jnp.bfloat16))


def test_a_parameter_that_all_but_vanishes():
    """From a copy just below 1 to one just below 0: the step between is not a float32 number."""
    optimizer, tiny = float32_state(optax.sgd(1.0)), 3 * 2.0**-24
    params = jnp.ones(1, jnp.bfloat16)
    state = optimizer.init(params)
    for aim in (0.999, -tiny):
        updates, state = optimizer.update(state.master[0] - jnp.float32(aim), state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(params, state.master[0].astype(jnp.bfloat16))
    assert 0 < -params[0].astype(jnp.float32) < 2 * tiny


@pytest.mark.parametrize("low", [jnp.bfloat16, jnp.float16])
def test_a_wrapper_that_leaves_out_updates_goes_inside(low):
    """Non-finite gradients change nothing: neither the float32 copy nor the parameter."""
    params = parameters(low)
    gradients = gradients_of(params, 6)
    spoilt = jax.tree.map(lambda x: x * jnp.nan, gradients[0])
    plain = optax.sgd(2.0**-10)  # a power of two, so that compiled and eager steps are equal
    optimizer = float32_state(optax.apply_if_finite(plain, 3))
    found, state = train(optimizer, params, [*gradients[:4], spoilt, *gradients[4:]])
    truth, expected = train(float32_state(plain), params, gradients)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, found, truth))
    assert jnp.array_equal(state.master[0], expected.master[0])
    assert state.inner.total_notfinite == 1


WRAPPERS = {
    "chain": lambda optimizer: optax.chain(optax.clip_by_global_norm(1e6), optimizer),
    "masked": lambda optimizer: optax.masked(optimizer, {"kernel": True, "scale": True}),
    "inject": lambda optimizer: optax.inject_hyperparams(lambda rate: optimizer)(rate=0.5),
    "partition": lambda optimizer: optax.partition(
        {"all": optimizer}, {"kernel": "all", "scale": "all"}
    ),
    "MultiSteps": lambda optimizer: optax.MultiSteps(optimizer, 1),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("low", [jnp.bfloat16, jnp.float16])
def test_wrappers_of_optax_around_it(low, wrap):
    params, optimizer = parameters(low), float32_state(optax.sgd(1e-3, momentum=0.5))
    gradients = gradients_of(params, 5)
    found, _ = train(wrap(optimizer), params, gradients)
    truth, _ = train(optimizer, params, gradients)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, found, truth))
    assert found["kernel"].dtype == low


def test_extra_arguments_reach_the_optimizer():
    seen = []

    def update(updates, state, params=None, *, value):
        seen.append(value)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    params = jnp.ones(2, jnp.bfloat16)
    optimizer = float32_state(inner)
    optimizer.update(params, optimizer.init(params), params, value=3)
    assert seen == [3]


def test_without_parameters():
    optimizer = float32_state(optax.sgd(0.1))
    with pytest.raises(
        ValueError, match=r"needs the parameters, .*; got params=None\. Call update\("
    ):
        optimizer.update(jnp.ones(2), optimizer.init(jnp.ones(2)))


@pytest.mark.usefixtures("no_shape_checks")
def test_it_goes_around_an_optimizer_of_optax_and_into_one_of_nnx():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    rule = r"with init and update; got {}\. Write nnx\.Optimizer\(model, float32_state\("
    with pytest.raises(ValueError, match=rule.format("Optimizer")):
        float32_state(optimizer)
    with pytest.raises(ValueError, match=rule.format("float")):
        float32_state(1e-3)


def test_a_model_in_bfloat16_learns():
    config = GPT2Config(8, 2, 1, context_length=8, vocab_size=11, dropout=0.0)
    model = GPT2(config, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, float32_state(optax.adamw(0.01)), wrt=nnx.Param)
    tokens = jnp.arange(12).reshape(2, 6) % 11
    losses = [float(train_step(model, optimizer, tokens)) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    copies = jax.tree.leaves(nnx.as_pure(optimizer.opt_state).master)
    params = jax.tree.leaves(nnx.as_pure(nnx.state(model, nnx.Param)))
    assert len(copies) == len(params)
    for copy, param in zip(copies, params, strict=True):
        np.testing.assert_array_equal(param, copy.astype(jnp.bfloat16))
