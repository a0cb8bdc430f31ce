"""What the guide of migration compares by: it passes what is equal, and fails what is not."""

import importlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("side_by_side")


def linear_and_gradients():
    """Return a PyTorch layer after a backward pass, and the same gradients as Flax names them."""
    layer = torch.nn.Linear(3, 2).double()
    output = layer(torch.randn(4, 3, dtype=torch.float64))
    output.square().sum().backward()
    weight, bias = layer.weight.grad, layer.bias.grad
    kernel = nnx.Param(jnp.asarray(weight.numpy().T))
    state = nnx.State({"kernel": kernel, "bias": nnx.Param(jnp.asarray(bias.numpy()))})
    return layer, state


def test_outputs(compare, capsys):
    tensor = torch.arange(6.0, dtype=torch.float64)
    output = tensor.numpy()
    # The largest number is 5, and errors are relative to it.
    compare.same(output + 1e-13, tensor)
    assert capsys.readouterr().out == "equal: error 2e-14, rule 1e-12\n"
    with pytest.raises(AssertionError, match=r"not equal: error 2\.0e-10, rule 1e-12"):
        compare.same(output + 1e-9, tensor)
    # Another shape is not broadcast.
    with pytest.raises(AssertionError, match="error inf"):
        compare.same(output[:5], tensor)


def test_gradients(compare, capsys):
    layer, state = linear_and_gradients()
    compare.same_gradients(state, layer, "torch")
    assert capsys.readouterr().out.startswith("2 gradients equal: error 0e+00")
    state["bias"][...] += 1e-6
    with pytest.raises(AssertionError, match="not 2 gradients equal"):
        compare.same_gradients(state, layer, "torch")


def test_gradients_of_other_parameters(compare):
    layer, state = linear_and_gradients()
    del state["bias"]
    with pytest.raises(AssertionError, match="bias"):
        compare.same_gradients(state, layer, "torch")


def test_gradients_that_should_be_rounding(compare):
    layer, state = linear_and_gradients()
    # A gradient of zeros has no size by which 1e-6 beside it could be rounding.
    layer.bias.grad = torch.zeros(2, dtype=torch.float64)
    state["bias"][...] = jnp.asarray(np.full(2, 1e-6))
    with pytest.raises(AssertionError):
        compare.same_gradients(state, layer, "torch")
