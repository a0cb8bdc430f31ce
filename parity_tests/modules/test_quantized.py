"""Matrices in 8 bits: the layer and whole models, beside PyTorch and beside what was quantized."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import flax_attn
import torch_ref
from flax_attn import convert
from flax_attn.models import quantize
from torch_ref.models import quantize as quantize_torch

pytestmark = pytest.mark.usefixtures("x64")


def numbers(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape)


def test_the_layer_is_that_of_pytorch():
    matrix, bias, x = numbers(7, 5), numbers(5), numbers(2, 3, 7)
    matrix[:, 2] = 0
    ours = flax_attn.QuantizedLinear(jnp.asarray(matrix), jnp.asarray(bias))
    theirs = torch_ref.QuantizedLinear(torch.tensor(matrix), torch.tensor(bias))
    np.testing.assert_array_equal(ours.kernel[...].T, theirs.weight)
    expected = x @ (np.asarray(ours.kernel[...]) * np.asarray(ours.scale[...])) + bias
    np.testing.assert_allclose(ours(jnp.asarray(x)), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        ours(jnp.asarray(x)), theirs(torch.tensor(x)).detach(), rtol=0, atol=1e-12
    )


def test_the_output_is_as_near_as_rounding_allows():
    matrix, x = numbers(31, 9), numbers(4, 31)
    layer = flax_attn.QuantizedLinear(jnp.asarray(matrix))
    scale = np.asarray(layer.scale[...])
    bound = np.abs(x).sum(axis=-1, keepdims=True) * scale / 2
    error = np.abs(layer(jnp.asarray(x)) - x @ matrix)
    assert (error <= bound).all()
    # Its matrix is one of 255 numbers a column, and not the given one.
    assert error.max() > bound.max() / 100


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_that_of_pytorch(tied):
    sizes = {"num_heads": 4, "num_layers": 2, "num_kv_heads": 2, "vocab_size": 11, "tied": tied}
    config = flax_attn.LlamaConfig(8, 10, **sizes)
    theirs = torch_ref.Llama(config).double().eval()
    ours = flax_attn.Llama(config, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    ours.eval()
    weights = {name: value.detach().numpy() for name, value in theirs.state_dict().items()}
    convert.load_state_dict(ours, weights)
    quantize_torch(theirs)
    quantize(ours)
    assert type(ours.out_head).__name__ == type(theirs.out_head).__name__ == "QuantizedLinear"
    tokens = np.array([[3, 1, 4, 1, 5]])
    found = ours(jnp.asarray(tokens))
    expected = theirs(torch.tensor(tokens)).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    # The int8 kernels cross like weights.
    state = convert.state_dict(ours)
    assert state["trf_blocks.0.att.W_query.weight"].dtype == np.int8
    assert state.keys() == theirs.state_dict().keys()


def test_both_refuse_alike():
    with pytest.raises(ValueError, match="two axes"):
        flax_attn.QuantizedLinear(jnp.ones((2, 3, 4)))
    with pytest.raises(ValueError, match="two axes"):
        torch_ref.QuantizedLinear(torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match="needs a model with a Linear"):
        quantize(flax_attn.RMSNorm(3))
    with pytest.raises(ValueError, match="needs a model with a Linear"):
        quantize_torch(torch_ref.RMSNorm(3))
    with pytest.raises(ValueError, match="weights must be"):
        quantize(flax_attn.RMSNorm(3), "int4")
