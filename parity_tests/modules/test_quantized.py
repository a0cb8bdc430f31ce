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


MATRIX, BIAS, X = numbers(7, 5), numbers(5), numbers(2, 3, 7)
# Nothing can be divided by the largest number of this column.
MATRIX[:, 2] = 0


def test_the_layer_is_that_of_pytorch():
    ours = flax_attn.QuantizedLinear(jnp.asarray(MATRIX), jnp.asarray(BIAS))
    theirs = torch_ref.QuantizedLinear(torch.tensor(MATRIX), torch.tensor(BIAS))
    np.testing.assert_array_equal(ours.kernel[...].T, theirs.weight)
    output, expected = ours(jnp.asarray(X)), theirs(torch.tensor(X)).detach()
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-12)


def test_the_layer_is_a_product_with_its_scaled_matrix():
    layer = flax_attn.QuantizedLinear(jnp.asarray(MATRIX), jnp.asarray(BIAS))
    matrix = np.asarray(layer.kernel[...]) * np.asarray(layer.scale[...])
    np.testing.assert_allclose(layer(jnp.asarray(X)), X @ matrix + BIAS, rtol=0, atol=1e-12)


def test_the_output_is_as_near_as_rounding_allows():
    matrix, x = numbers(31, 9), numbers(4, 31)
    layer = flax_attn.QuantizedLinear(jnp.asarray(matrix))
    error = np.abs(layer(jnp.asarray(x)) - x @ matrix)
    bound = np.abs(x).sum(axis=-1, keepdims=True) * np.asarray(layer.scale[...]) / 2
    assert (error <= bound).all()
    # Its matrix is one of 255 numbers a column, and not the given one.
    assert error.max() > bound.max() / 100


@pytest.fixture(params=[True, False], ids=["tied", "own head"])
def models(request):
    """Return a quantized model of both sides, made of the same weights."""
    sizes = {"num_heads": 4, "num_layers": 2, "num_kv_heads": 2, "vocab_size": 11}
    return quantized(flax_attn.LlamaConfig(8, 10, **sizes, tied=request.param))


def quantized(config):
    theirs = torch_ref.Llama(config).double().eval()
    ours = flax_attn.Llama(config, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    ours.eval()
    convert.load_state_dict(ours, theirs.state_dict())
    quantize_torch(theirs)
    quantize(ours)
    return ours, theirs


def test_a_model_is_that_of_pytorch(models):
    ours, theirs = models
    tokens = np.array([[3, 1, 4, 1, 5]])
    found = ours(jnp.asarray(tokens))
    expected = theirs(torch.tensor(tokens)).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def test_the_kernels_of_a_model_are_quantized_and_cross_like_weights(models):
    ours, theirs = models
    assert type(ours.out_head).__name__ == type(theirs.out_head).__name__ == "QuantizedLinear"
    state = convert.state_dict(ours)
    # As they are, not multiplied by their scales.
    assert state["trf_blocks.0.att.W_query.weight"].dtype == np.int8
    assert state.keys() == theirs.state_dict().keys()


# What is refused, and the rule that is said.
BAD_CALLS = [
    (lambda: flax_attn.QuantizedLinear(jnp.ones((2, 3, 4))), "two axes"),
    (lambda: torch_ref.QuantizedLinear(torch.ones(2, 3, 4)), "two axes"),
    (lambda: quantize(flax_attn.RMSNorm(3)), "needs a model with a Linear"),
    (lambda: quantize_torch(torch_ref.RMSNorm(3)), "needs a model with a Linear"),
    (lambda: quantize(flax_attn.RMSNorm(3), "int4"), "weights must be"),
]


@pytest.mark.parametrize(("call", "rule"), BAD_CALLS)
def test_both_refuse_alike(call, rule):
    with pytest.raises(ValueError, match=rule):
        call()
