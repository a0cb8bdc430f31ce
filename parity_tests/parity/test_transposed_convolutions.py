"""`compare` of transposed convolutions, whose kernel may lie from either end."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from torch import nn

from flax_attn.parity import compare

INPUTS = [(2, 5, 12)]
CHECKS = ["forward", "gradients", "training"]


class Flax(nnx.Module):
    """A transposed convolution with a kernel of its own, read from one end or the other."""

    def __init__(self, step, padding=(2, 2)):
        rngs = nnx.Rngs(0)
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (4, 5, 6)))
        self.bias = nnx.Param(jnp.zeros(6))
        self.step, self.padding = step, padding

    def __call__(self, x):
        channels_last = jnp.moveaxis(x, 1, -1)
        kernel = self.kernel[:: self.step]
        y = jax.lax.conv_transpose(channels_last, kernel, (2,), [self.padding])
        y = y + jnp.broadcast_to(self.bias[...], y.shape)
        return jnp.moveaxis(y, -1, 1)


def theirs():
    return nn.ConvTranspose1d(5, 6, 4, stride=2, padding=1)


@pytest.mark.parametrize(("step", "flipped"), [(1, ("s0",)), (-1, ())])
def test_the_outputs_tell_whether_a_kernel_is_flipped(step, flipped):
    report = compare(Flax(step), theirs(), INPUTS, checks=CHECKS)
    assert report.passed, report.explain()
    rules = {entry.theirs: entry.rule for entry in report.pair.entries}
    assert rules["weight"].flipped == flipped


def test_another_shift_is_a_difference():
    report = compare(Flax(1, (3, 1)), theirs(), INPUTS, checks=["forward"])
    assert report.differs


class Layer(nnx.Module):
    def __init__(self):
        options = {"strides": 2, "padding": [(2, 2)], "rngs": nnx.Rngs(0)}
        self.up = nnx.ConvTranspose(5, 6, (4,), **options)

    def __call__(self, x):
        return jnp.moveaxis(self.up(jnp.moveaxis(x, 1, -1)), -1, 1)


def test_a_layer_of_flax_that_is_built_without_transpose_kernel():
    report = compare(Layer(), nn.Sequential(theirs()), INPUTS, checks=CHECKS)
    assert report.passed, report.explain()


def test_a_layer_of_equinox():
    ours = eqx.nn.ConvTranspose1d(5, 6, 4, stride=2, padding=1, key=jax.random.key(0))
    report = compare(eqx.filter_vmap(ours), theirs(), INPUTS, checks=CHECKS)
    assert report.passed, report.explain()
