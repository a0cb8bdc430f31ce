from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError

from flax_attn import MultiHeadAttention, Outputs
from flax_attn.parity import tolerance


def loss(module, inputs):
    """A cotangent that is different everywhere: the distance to a wave."""
    output = module(*inputs)
    target = jnp.cos(jnp.arange(output.size, dtype=output.dtype)).reshape(output.shape)
    return jnp.square(output - target).mean()


@nnx.jit
def call(module, inputs):
    return module(*inputs)


@nnx.jit
def gradients(module, inputs):
    return nnx.value_and_grad(loss, argnums=(0, 1))(module, inputs)


@nnx.jit
def step(module, optimizer, inputs):
    value, grads = nnx.value_and_grad(loss)(module, inputs)
    update(optimizer, module, grads)
    return value


def update(optimizer, module, grads):
    with jax.numpy_dtype_promotion("standard"):  # optax divides floats by integers
        optimizer.update(module, grads)


def params(module):
    return nnx.to_flat_state(nnx.state(module, nnx.Param))


def test_jit_equals_eager(typical, close):
    module, inputs = typical.build(), typical.inputs()
    close(call(module, inputs), module(*inputs))


def test_vmap_over_unbatched_call_equals_batched_call(variant, close):
    module, inputs = variant.build(), variant.inputs()
    close(jax.jit(jax.vmap(module))(*inputs), call(module, inputs))


def test_vmap_over_batched_call(typical, close):
    module, inputs = typical.build(), typical.inputs()
    attend = partial(module.attend, return_weights=True)
    found = jax.vmap(attend)(*(jnp.stack([x, -x]) for x in inputs))
    close(jax.tree.map(lambda x: x[0], found), attend(*inputs))
    close(jax.tree.map(lambda x: x[1], found), attend(*(-x for x in inputs)))


def test_gradients_of_inputs(variant):
    inputs = variant.inputs()
    _, (_, grads) = gradients(variant.build(), inputs)
    for grad, array in zip(grads, inputs, strict=True):
        assert grad.shape == array.shape
        assert np.isfinite(grad).all()
        assert (np.abs(grad).max(axis=-1) > 1e-6).all()


def test_gradients_of_parameters(learning):
    module = learning.build()
    _, (grads, _) = gradients(module, learning.inputs())
    grads = nnx.to_flat_state(grads)
    assert [path for path, _ in grads] == [path for path, _ in params(module)]
    for path, grad in grads:
        felt = path[-2:] != ("W_key", "bias")  # adds one number to a whole row of scores
        assert np.isfinite(grad[...]).all(), path
        assert (np.abs(grad[...]).max() > 1e-4) == felt, path


def test_training_lowers_the_loss_and_moves_every_parameter(typical):
    module, inputs = typical.build(), typical.inputs()
    before = nnx.clone(module)
    optimizer = nnx.Optimizer(module, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    losses = []
    for _ in range(15):
        value, (grads, _) = gradients(module, inputs)
        update(optimizer, module, grads)
        losses.append(float(value))
    assert losses[-1] < 0.95 * losses[0]
    for (path, new), (_, old) in zip(params(module), params(before), strict=True):
        assert path[-2:] == ("W_key", "bias") or (new[...] != old[...]).mean() > 0.9, path


def test_whole_step_under_jit_with_dropout(typical):
    module, inputs = typical.build(dropout=0.1), typical.inputs()
    optimizer = nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param)
    losses = [step(module, optimizer, inputs) for _ in range(30)]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    assert int(optimizer.step[...]) == 30


def test_checkpoint_has_equal_gradients(typical, close):
    module, inputs = typical.build(), typical.inputs()
    graphdef, state = nnx.split(module)
    remat = jax.checkpoint(lambda state, inputs: loss(nnx.merge(graphdef, state), inputs))
    value, (grads, felt) = gradients(module, inputs)
    actual, (remat_grads, remat_felt) = jax.jit(jax.value_and_grad(remat, argnums=(0, 1)))(
        state, inputs
    )
    close((actual, jax.tree.leaves(remat_grads), remat_felt), (value, jax.tree.leaves(grads), felt))


def test_remat_drops_the_same_weights_again(typical, close):
    plain, remat = typical.build(dropout=0.5), typical.build(dropout=0.5)
    inputs, remat_gradients = (
        typical.inputs(),
        nnx.jit(nnx.value_and_grad(nnx.remat(loss), argnums=(0, 1))),
    )
    results = [(gradients(plain, inputs), remat_gradients(remat, inputs)) for _ in range(2)]
    for expected, actual in results:
        close(jax.tree.leaves(actual), jax.tree.leaves(expected))
    assert results[0][0][0] != results[1][0][0]


def test_forward_and_reverse_derivatives_match_differences(typical, x64):
    graphdef, state = nnx.split(typical.build(param_dtype=jnp.float64))
    leaves, tree = jax.tree.flatten((state, typical.inputs(jnp.float64)))
    direction = [
        jnp.sin(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape) for leaf in leaves
    ]

    def value(leaves):
        state, inputs = jax.tree.unflatten(tree, leaves)
        return loss(nnx.merge(graphdef, state), inputs)

    @jax.jit
    def derivatives(leaves, direction):
        forward = jax.jvp(value, (leaves,), (direction,))[1]
        reverse = sum(
            jnp.vdot(g, d) for g, d in zip(jax.grad(value)(leaves), direction, strict=True)
        )
        ends = jnp.array([-1e-5, 1e-5])
        low, high = jax.lax.map(
            lambda e: value([x + e * d for x, d in zip(leaves, direction, strict=True)]), ends
        )
        return forward, reverse, (high - low) / 2e-5

    forward, reverse, difference = derivatives(leaves, direction)
    np.testing.assert_allclose(forward, reverse, rtol=tolerance.GRADIENT)
    # The error of the difference itself is its step squared.
    np.testing.assert_allclose(forward, difference, rtol=1e-6)
    assert abs(forward) > 1e-3


def test_eval_shape_of_construction(variant):
    abstract, real = (
        nnx.state(module) for module in (nnx.eval_shape(variant.create), variant.create())
    )
    assert jax.tree.structure(abstract) == jax.tree.structure(real)
    for shaped, array in zip(jax.tree.leaves(abstract), jax.tree.leaves(real), strict=True):
        assert isinstance(shaped, jax.ShapeDtypeStruct)
        assert (shaped.shape, shaped.dtype) == (array.shape, array.dtype)


def test_eval_shape_of_call(weighing):
    module, inputs = weighing.build(), weighing.inputs()
    attend = partial(module.attend, return_weights=True)

    def shapes(inputs):
        outputs = jax.eval_shape(attend, *inputs)
        assert isinstance(outputs, Outputs)
        return [(x.shape, x.dtype) for x in jax.tree.leaves(outputs)]

    assert shapes(inputs) == [(x.shape, x.dtype) for x in jax.tree.leaves(attend(*inputs))]
    assert shapes([x[0] for x in inputs]) == [(shape[1:], dtype) for shape, dtype in shapes(inputs)]


def test_dropout_in_a_layer_that_a_transform_has_captured():
    layer = MultiHeadAttention(4, 4, 5, 0.25, 2, rngs=nnx.Rngs(0))
    x = jnp.ones((3, 5, 4))
    rule = (
        r"^dropout=0\.25 in train mode counts the keys that it draws, and a transform .* captured\."
        r" Pass the module .*nnx\.jit\(lambda layer, x: layer\(x\)\).*nnx\.split"
    )
    for transformed in (jax.jit(lambda x: layer(x)), jax.vmap(lambda x: layer(x))):
        with pytest.raises(TraceContextError, match=rule):
            transformed(x)
    # What the error names works.
    nnx.jit(lambda layer, x: layer(x))(layer, x)
    jax.jit(lambda x: layer(x, dropout_key=jax.random.key(0)))(x)
    layer.eval()
    jax.jit(lambda x: layer(x))(x)
