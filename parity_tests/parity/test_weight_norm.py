"""`compare` of layers whose weight PyTorch computes by weight norm, in its newer and older way."""

import warnings

import jax.numpy as jnp
import pytest
import torch
from flax import nnx
from torch import nn
from torch.nn.utils import parametrizations

from flax_attn.parity import compare

INPUTS = [(2, 5, 8)]
# With the second derivatives, which PyTorch has wrong, and a run in which it copies the module.
CHECKS = ["forward", "gradients", "second", "training"]


class Layer(nnx.Module):
    """A linear layer under weight norm, with the norm over an axis of its weight."""

    def __init__(self, axis=0, *, rngs):
        self.v = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (8, 16)))
        self.g = nnx.Param(jnp.ones((1, 16)))
        self.bias = nnx.Param(jnp.zeros(16))
        self.axis = axis

    def __call__(self, x):
        v = self.v[...]
        norm = jnp.sqrt(jnp.sum(v**2, axis=self.axis, keepdims=True))
        product = x @ (v / norm * self.g[...])
        return product + jnp.broadcast_to(self.bias[...], product.shape)


class Flax(nnx.Module):
    def __init__(self, axis=0):
        rngs = nnx.Rngs(0)
        self.up = Layer(axis, rngs=rngs)
        self.down = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


class Torch(nn.Module):
    def __init__(self, weight_norm):
        super().__init__()
        self.up = weight_norm(nn.Linear(8, 16))
        self.down = nn.Linear(16, 4)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def older(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(layer)


@pytest.mark.parametrize("weight_norm", [parametrizations.weight_norm, older])
def test_a_right_port_is_equal(weight_norm):
    report = compare(Flax(), Torch(weight_norm), INPUTS, checks=CHECKS)
    assert report.passed, report.explain()
    assert {check.name for check in report.checks if check.ran} >= set(CHECKS)


def test_a_norm_over_the_other_axis_is_named():
    report = compare(Flax(axis=1), Torch(parametrizations.weight_norm), INPUTS, checks=["forward"])
    assert report.differs
    text = report.explain()
    assert "norm over axis 1 of (8, 16)" in text or "sum over 16" in text, text
