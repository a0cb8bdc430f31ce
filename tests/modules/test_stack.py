"""Blocks stacked with `nnx.vmap` and run with `nnx.scan`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import Dropout, FeedForward, LayerNorm, MultiHeadAttention, TransformerBlock

LAYERS = 2


@pytest.fixture(scope="module")
def created():
    @nnx.jit
    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(rngs):
        att = MultiHeadAttention(24, 24, 11, 0.5, 4, True, rngs=rngs)
        ff = FeedForward(24, 10, rngs=rngs)
        return TransformerBlock(
            att, ff, LayerNorm(24), LayerNorm(24), drop_shortcut=Dropout(0.5, rngs=rngs)
        )

    return create(nnx.Rngs(0))


@pytest.fixture
def stack(created):
    return nnx.clone(created)


def layers(stack):
    graphdef, state = nnx.split(stack)
    states = jax.jit(
        lambda state: [jax.tree.map(lambda x, i=i: x[i], state) for i in range(LAYERS)]
    )
    return [nnx.merge(graphdef, one) for one in states(state)]


@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def scan(x, block):
    return block(x)


def loop(x, blocks):
    for block in blocks:
        x = block(x)
    return x


def tokens():
    return jnp.asarray(np.random.default_rng(1).normal(size=(3, 5, 24)), jnp.float32)


def test_layers_of_a_stack_differ(stack):
    first, second = layers(stack)
    assert (first.att.W_query.kernel[...] != second.att.W_query.kernel[...]).all()
    assert first.drop_shortcut.stream.key[...] != second.drop_shortcut.stream.key[...]


def test_scan_equals_loop(stack, close):
    x = tokens()
    blocks = nnx.List(layers(stack))
    outputs = [nnx.jit(scan)(x, stack) for _ in range(2)]
    close(outputs, [nnx.jit(loop)(x, blocks) for _ in range(2)])
    assert not (outputs[0] == outputs[1]).all()


def test_gradients_through_remat_and_scan_equal_loop(stack, close):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def rematerialised(x, block):
        return block(x)

    stack.eval()
    blocks, x = nnx.List(layers(stack)), tokens()
    stacked, looped = (
        nnx.jit(nnx.grad(lambda layers, run=run: jnp.square(run(x, layers)).mean()))(layers)
        for run, layers in ((rematerialised, stack), (loop, blocks))
    )
    for i in range(LAYERS):
        close([leaf[i] for leaf in jax.tree.leaves(stacked)], jax.tree.leaves(looped[i]))


def test_keys_handed_in_equal_loop(stack, close):
    @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
    def keyed(x, block, key):
        return block(x, dropout_key=key)

    keys = jax.random.split(jax.random.key(2), LAYERS)
    expected = tokens()
    for block, key in zip(layers(stack), keys, strict=True):
        expected = block(expected, dropout_key=key)
    for _ in range(2):
        close(nnx.jit(keyed)(tokens(), stack, keys), expected)


def test_weights_of_all_layers(stack, close):
    stack.eval()

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def weighed(x, block):
        attended = block.attend(x, return_weights=True)
        return attended.output, attended.weights

    _, weights = nnx.jit(weighed)(tokens(), stack)
    assert weights.shape == (LAYERS, 3, 4, 5, 5)
    close(weights.sum(axis=-1), jnp.ones((LAYERS, 3, 4, 5)))


def test_split_streams_drop_other_elements_for_each_example():
    layer = MultiHeadAttention(7, 12, 8, 0.5, 4, rngs=nnx.Rngs(0))
    axes = nnx.StateAxes({nnx.RngState: 0, ...: None})

    @nnx.jit
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(axes, 0), out_axes=0)
    def each(layer, x):
        return layer(x)

    outputs = each(layer, jnp.broadcast_to(tokens()[:1, :, :7], (3, 5, 7)))
    assert not (outputs[0] == outputs[1]).all()
    assert not (outputs[1] == outputs[2]).all()
