"""Matrices in 8 and 4 bits: layers and models, beside PyTorch and beside what was quantized."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import flax_attn
import torch_ref
from flax_attn import convert
from flax_attn.functional.quantized import QuantizedMatrix
from flax_attn.models import quantize
from flax_attn.models.quantize import quantized_as
from torch_ref.functional.quantized import QuantizedMatrix as OfTorch
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
    np.testing.assert_array_equal(ours.weight[...], theirs.weight)
    output, expected = ours(jnp.asarray(X)), theirs(torch.tensor(X)).detach()
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-12)


def test_the_layer_is_a_product_with_its_scaled_matrix():
    layer = flax_attn.QuantizedLinear(jnp.asarray(MATRIX), jnp.asarray(BIAS))
    matrix = np.asarray(layer.weight[...]) * np.asarray(layer.scale[...])
    np.testing.assert_allclose(layer(jnp.asarray(X)), X @ matrix.T + BIAS, rtol=0, atol=1e-12)


# The numbers that are held, their block, and the sizes of a matrix.
FORMATS = [("int8", (1, 32)), ("float8_e4m3fn", (16, 8)), ("uint8", (1, 32))]
D_OUT, D_IN = 18, 32


def numerics():
    return {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}


def held(weight, block, *lead):
    """Return the same matrices (..., 18, 32) of random numbers for both sides."""
    numbers, scale = drawn_numbers(weight, lead), drawn_scale(weight, block, lead)
    # PyTorch takes no floats of 8 bits from NumPy: the bytes cross.
    codes = torch.from_numpy(numbers.view(np.uint8)).view(getattr(torch, weight))
    parts = jnp.asarray(numbers), jnp.asarray(scale)
    ours = QuantizedMatrix(*parts, block, jnp.dtype("float64"))
    return ours, OfTorch(codes, torch.from_numpy(scale), block, torch.float64)


def drawn_numbers(weight, lead):
    # A byte of 4-bit numbers holds two.
    width = D_IN // 2 if weight == "uint8" else D_IN
    rng = np.random.default_rng(len(lead))
    codes = rng.integers(0, 120, (*lead, D_OUT, width), np.uint8)
    return codes if weight == "uint8" else codes.view(weight)


def drawn_scale(weight, block, lead):
    height, width = block
    shape = *lead, -(-D_OUT // height), -(-D_IN // width)
    rng = np.random.default_rng(len(shape))
    if weight == "uint8":
        return rng.integers(120, 130, shape, np.uint8)
    return rng.uniform(0.5, 2, shape)


def assert_close(found, expected):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * scale)


def of_flax(matrix, bias, x):
    layer = flax_attn.QuantizedLinear(matrix, jnp.asarray(bias))
    return layer(jnp.asarray(x))


def of_torch(matrix, bias, x):
    layer = torch_ref.QuantizedLinear(matrix, torch.tensor(bias))
    return layer(torch.tensor(x)).detach()


@pytest.mark.parametrize(("weight", "block"), FORMATS)
def test_every_format_has_the_numbers_of_pytorch(weight, block):
    ours, theirs = held(weight, block)
    np.testing.assert_array_equal(ours.floats(), theirs.floats())
    assert len(np.unique(ours.floats())) > 10


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize(("weight", "block"), FORMATS)
def test_every_format_is_that_of_pytorch(weight, block, lead):
    ours, theirs = held(weight, block, *lead)
    bias, x = numbers(*lead, D_OUT), numbers(*lead, 4, D_IN)
    kernel = np.asarray(ours.floats()).swapaxes(-1, -2)
    expected = x @ kernel + bias[..., None, :]
    assert_close(of_flax(ours, bias, x), expected)
    assert_close(of_torch(theirs, bias, x), expected)


# These are held in each format; the third matrix of an expert stays as it is.
HELD = ("W_gate", "W_up")


@pytest.fixture(params=["sorted", "dense"])
def experts(request):
    """Return experts of both sides, with the same weights."""
    ours = flax_attn.Experts(3, D_IN, D_OUT, bias=True, form=request.param, **numerics())
    theirs = torch_ref.Experts(3, D_IN, D_OUT, bias=True).double()
    for name in (*HELD, "W_down"):
        copy_weights(getattr(ours, name), getattr(theirs, name))
    return ours, theirs


def copy_weights(ours, theirs):
    matrices = ours.kernel[...].swapaxes(1, 2)
    theirs.weight.data = torch.tensor(np.asarray(matrices))
    theirs.bias.data = torch.tensor(np.asarray(ours.bias[...]))


def routed(x):
    """Return where a router sends tokens, for both sides."""
    ours = flax_attn.Router(D_IN, 3, top_k=2, **numerics())(jnp.asarray(x))
    weights, experts, logits = (torch.tensor(np.asarray(part)) for part in ours)
    return ours, torch_ref.Routing(weights, experts.long(), logits)


def hold(ours, theirs, matrix, of_torch):
    """Hold two matrices of each expert as they are given."""
    for name in HELD:
        setattr(ours, name, quantized_as(getattr(ours, name), matrix))
        layer = torch_ref.QuantizedLinear(of_torch, getattr(theirs, name).bias)
        setattr(theirs, name, layer)


@pytest.fixture(params=FORMATS)
def matrices(request):
    return held(*request.param, 3)


def test_experts_are_those_of_pytorch_and_of_floats(matrices, experts):
    ours, theirs = experts
    matrix, other = matrices
    x = numbers(2, 5, D_IN)
    routing, of_torch = routed(x)
    # In floats first, then as they are held.
    for name in HELD:
        kernel = matrix.floats().swapaxes(1, 2)
        getattr(ours, name).kernel.set_value(kernel)
    floats = np.asarray(ours(jnp.asarray(x), routing))
    hold(ours, theirs, matrix, other)
    output = ours(jnp.asarray(x), routing)
    assert_close(output, floats)
    output = theirs(torch.tensor(x), of_torch)
    assert_close(output.detach(), floats)


def rounding_error(layer, matrix, x):
    error = np.abs(layer(jnp.asarray(x)) - x @ matrix)
    largest = np.abs(x).sum(axis=-1, keepdims=True)
    return error, largest * np.asarray(layer.scale[...]).T / 2


def test_the_output_is_as_near_as_rounding_allows():
    matrix, x = numbers(31, 9), numbers(4, 31)
    layer = flax_attn.QuantizedLinear(jnp.asarray(matrix))
    error, bound = rounding_error(layer, matrix, x)
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
    ours = flax_attn.Llama(config, **numerics())
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


def _without_a_scale(layer, side):
    matrix = held("float8_e4m3fn", (16, 8))[side]
    return layer(dataclasses.replace(matrix, scale=matrix.scale[:1]))


# What is refused, and the rule that is said.
_SCALES = r"scale must have a number for each block of \(16, 8\), \(2, 4\) .* got \(1, 4\)"
BAD_CALLS = [
    (lambda: flax_attn.QuantizedLinear(jnp.ones((2, 3, 4))), "two axes"),
    (lambda: torch_ref.QuantizedLinear(torch.ones(2, 3, 4)), "two axes"),
    (lambda: _without_a_scale(flax_attn.QuantizedLinear, 0), _SCALES),
    (lambda: _without_a_scale(torch_ref.QuantizedLinear, 1), _SCALES),
    (lambda: quantize(flax_attn.RMSNorm(3)), "needs a model with a Linear"),
    (lambda: quantize_torch(torch_ref.RMSNorm(3)), "needs a model with a Linear"),
    (lambda: quantize(flax_attn.RMSNorm(3), "int4"), "weights must be"),
]


@pytest.mark.parametrize(("call", "rule"), BAD_CALLS)
def test_both_refuse_alike(call, rule):
    with pytest.raises(ValueError, match=rule):
        call()
