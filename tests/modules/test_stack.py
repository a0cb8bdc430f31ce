"""Blocks stacked with `nnx.vmap` and run with `nnx.scan`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import TransformerBlock

LAYERS = 2


def create(dropout):
    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs):
        return TransformerBlock(12, 8, dropout, 4, True, num_kv_heads=1, d_hidden=9, rngs=rngs)

    return stack(nnx.Rngs(0))


def layers(stack):
    graphdef, state = nnx.split(stack)
    return [nnx.merge(graphdef, jax.tree.map(lambda x, i=i: x[i], state)) for i in range(LAYERS)]


@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def scan(x, block):
    return block(x)


def loop(x, blocks):
    for block in blocks:
        x = block(x)
    return x


def tokens():
    return jax.random.normal(jax.random.key(1), (3, 5, 12))


def test_layers_of_a_stack_differ():
    first, second = layers(create(0.5))
    assert (first.att.W_query.kernel[...] != second.att.W_query.kernel[...]).all()
    assert first.drop_shortcut.stream.key[...] != second.drop_shortcut.stream.key[...]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_scan_equals_loop(dropout, close):
    stack, x = create(dropout), tokens()
    blocks = layers(stack)
    outputs = [nnx.jit(scan)(x, stack) for _ in range(2)]
    close(outputs, [loop(x, blocks) for _ in range(2)])
    assert bool((outputs[0] == outputs[1]).all()) is (dropout == 0)


def test_gradients_through_scan_equal_loop(close):
    stack, x = create(0.5), tokens()
    blocks = layers(stack)
    grads = nnx.jit(nnx.grad(lambda stack: jnp.square(scan(x, stack)).mean()))(stack)
    expected = nnx.jit(nnx.grad(lambda blocks: jnp.square(loop(x, blocks)).mean()))(nnx.List(blocks))
    for i, layer in enumerate(_leaves(expected)):
        close([leaf[i] for leaf in jax.tree.leaves(grads)], layer)


def _leaves(grads):
    return [jax.tree.leaves(grads[i]) for i in range(LAYERS)]


def test_remat_inside_scan_has_equal_gradients(close):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def rematerialised(x, block):
        return block(x)

    plain, remat = (
        nnx.jit(nnx.grad(lambda stack, run=run: jnp.square(run(tokens(), stack)).mean()))(create(0.5))
        for run in (scan, rematerialised)
    )
    close(remat, plain)


def test_keys_handed_in_equal_loop(close):
    @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
    def keyed(x, block, key):
        return block(x, dropout_key=key)

    stack, keys = create(0.5), jax.random.split(jax.random.key(2), LAYERS)
    expected = tokens()
    for block, key in zip(layers(stack), keys, strict=True):
        expected = block(expected, dropout_key=key)
    for _ in range(2):
        close(nnx.jit(keyed)(tokens(), stack, keys), expected)


def test_weights_of_all_layers():
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def weighed(x, block):
        return block(x, return_weights=True)

    _, weights = nnx.jit(weighed)(tokens(), create(0.0))
    assert weights.shape == (LAYERS, 3, 4, 5, 5)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)


def test_split_streams_drop_other_elements_for_each_example():
    block = TransformerBlock(12, 8, 0.5, 4, rngs=nnx.Rngs(0))
    axes = nnx.StateAxes({nnx.RngState: 0, ...: None})

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(axes, 0), out_axes=0)
    def each(block, x):
        return block(x)

    outputs = each(block, jnp.broadcast_to(tokens()[:1], (3, 5, 12)))
    assert not (outputs[0] == outputs[1]).all()
    assert not (outputs[1] == outputs[2]).all()
