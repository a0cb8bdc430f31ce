import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import optax
import pytest
from flax import nnx


def call(module, *inputs, **options):
    return module(*inputs, **options)


def params(module):
    return nnx.to_flat_state(nnx.state(module, nnx.Param))


def test_jit_equals_eager(variant, close):
    module, inputs = variant.build(), variant.inputs()
    close(nnx.jit(call)(module, *inputs), module(*inputs))


def test_output_feels_every_input(variant):
    module, inputs = variant.build(), variant.inputs()
    grads = jax.jit(jax.grad(lambda inputs: variant.loss(module, *inputs)))(inputs)
    for grad, array in zip(grads, inputs, strict=True):
        assert grad.shape == array.shape
        assert np.isfinite(grad).all()
        assert (np.abs(grad).max(axis=-1) > 1e-4).all()


def test_gradients_of_parameters(learning):
    module = learning.build()
    grads = nnx.to_flat_state(nnx.jit(nnx.grad(learning.loss))(module, *learning.inputs()))
    assert [path for path, _ in grads] == [path for path, _ in params(module)]
    for path, grad in grads:
        felt = path[-2:] != ("W_key", "bias")  # one number added to a whole row of scores
        assert np.isfinite(grad[...]).all(), path
        assert (np.abs(grad[...]).max() > 1e-2) if felt else (np.abs(grad[...]).max() < 1e-4), path


def test_training_lowers_the_loss_and_moves_every_parameter(learning):
    module = learning.build(dropout=0.1)
    inputs, before = learning.inputs(), nnx.clone(module)
    target = jnp.cos(jnp.arange(module(*inputs).size, dtype=jnp.float32)).reshape(module(*inputs).shape)
    optimizer = nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: jnp.square(m(*inputs) - target).mean())(module)
        with jax.numpy_dtype_promotion("standard"):  # optax divides floats by integers
            optimizer.update(module, grads)
        return loss

    losses = [step(module, optimizer) for _ in range(25)]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    for (path, new), (_, old) in zip(params(module), params(before), strict=True):
        assert path[-2:] == ("W_key", "bias") or (new[...] != old[...]).all(), path


def test_vmap_over_unbatched_call_equals_batched_call(variant, close):
    module, inputs = variant.build(), variant.inputs()
    close(jax.jit(jax.vmap(module))(*inputs), jax.jit(module)(*inputs))


def test_vmap_over_batched_call(weighing, close):
    module, inputs = weighing.build(), weighing.inputs()
    stacked = [jnp.stack([x, -x]) for x in inputs]
    expected = [jnp.stack(pair) for pair in zip(*(module(*xs, return_weights=True) for xs in _unstack(stacked)))]
    close(list(jax.jit(jax.vmap(lambda *xs: module(*xs, return_weights=True)))(*stacked)), expected)


def _unstack(arrays):
    return [[x[i] for x in arrays] for i in range(2)]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_remat_has_equal_gradients(dropping, dropout, close):
    plain, remat = dropping.build(dropout=dropout), dropping.build(dropout=dropout)
    inputs, grad = dropping.inputs(), nnx.jit(nnx.grad(dropping.loss))
    for _ in range(2):  # the second call draws the second key
        expected = grad(plain, *inputs)
        close(nnx.jit(nnx.grad(nnx.remat(dropping.loss)))(remat, *inputs), expected)
    assert any(np.abs(leaf).max() > 1e-2 for leaf in jax.tree.leaves(expected))


def test_checkpoint_has_equal_gradients(learning, close):
    graphdef, state = nnx.split(learning.build())
    inputs = learning.inputs()

    def loss(state, inputs):
        return learning.loss(nnx.merge(graphdef, state), *inputs)

    expected = jax.jit(jax.grad(loss, argnums=(0, 1)))(state, inputs)
    close(jax.jit(jax.grad(jax.checkpoint(loss), argnums=(0, 1)))(state, inputs), expected)


def test_forward_and_reverse_derivatives_match_differences(variant, x64):
    graphdef, state, rest = nnx.split(variant.build(param_dtype=jnp.float64, dropout=0.3), nnx.Param, ...)
    leaves, tree = jax.tree.flatten(state)

    @jax.jit
    def loss(leaves, inputs):
        return variant.loss(nnx.merge(graphdef, jax.tree.unflatten(tree, leaves), rest), *inputs)

    jax.test_util.check_grads(loss, (leaves, variant.inputs(jnp.float64)), order=1, rtol=1e-5, atol=1e-5)


def test_eval_shape_of_construction(variant):
    abstract, real = (nnx.state(module) for module in (nnx.eval_shape(variant.create), variant.create()))
    assert jax.tree.structure(abstract) == jax.tree.structure(real)
    for shaped, array in zip(jax.tree.leaves(abstract), jax.tree.leaves(real), strict=True):
        assert isinstance(shaped, jax.ShapeDtypeStruct)
        assert (shaped.shape, shaped.dtype) == (array.shape, array.dtype)


def test_eval_shape_of_call(weighing):
    module, inputs = weighing.build(), weighing.inputs()
    abstract = jax.eval_shape(lambda *xs: module(*xs, return_weights=True), *inputs)
    real = module(*inputs, return_weights=True)
    assert [(x.shape, x.dtype) for x in abstract] == [(x.shape, x.dtype) for x in real]
