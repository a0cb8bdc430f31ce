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


def held(weight, block, *lead):
    """Return the same matrices (..., 18, 32) of random numbers for both sides."""
    rng = np.random.default_rng(len(lead))
    d_in = 16 if weight == "uint8" else 32
    numbers = rng.integers(0, 120, (*lead, 18, d_in), np.uint8)
    blocks = [-(-size // edge) for size, edge in zip((18, 32), block, strict=True)]
    if weight == "uint8":
        scale = rng.integers(120, 130, (*lead, *blocks), np.uint8)
    else:
        numbers, scale = numbers.view(weight), rng.uniform(0.5, 2, (*lead, *blocks))
    parts = jnp.asarray(numbers), jnp.asarray(scale)
    ours = QuantizedMatrix(*parts, block, jnp.dtype("float64"))
    codes = torch.from_numpy(numbers.view(np.uint8)).view(getattr(torch, weight))
    theirs = OfTorch(codes, torch.from_numpy(scale), block, torch.float64)
    return ours, theirs


FORMATS = [("int8", (1, 32)), ("float8_e4m3fn", (16, 8)), ("uint8", (1, 32))]


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize(("weight", "block"), FORMATS)
def test_every_format_is_that_of_pytorch(weight, block, lead):
    pair = held(weight, block, *lead)
    floats = [np.asarray(one.floats()) for one in pair]
    np.testing.assert_array_equal(*floats)
    assert len(np.unique(floats[0])) > 10
    bias, x = numbers(*lead, 18), numbers(*lead, 4, 32)
    ours = flax_attn.QuantizedLinear(pair[0], jnp.asarray(bias))
    theirs = torch_ref.QuantizedLinear(pair[1], torch.tensor(bias))
    expected = x @ floats[0].swapaxes(-1, -2) + bias[..., None, :]
    scale = np.abs(expected).max()
    for found in (ours(jnp.asarray(x)), theirs(torch.tensor(x)).detach()):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize("form", ["sorted", "dense"])
@pytest.mark.parametrize(("weight", "block"), FORMATS)
def test_experts_are_those_of_pytorch_and_of_floats(weight, block, form):
    numerics = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}
    ours = flax_attn.Experts(3, 32, 18, bias=True, form=form, **numerics)
    router = flax_attn.Router(32, 3, top_k=2, **numerics)
    theirs = torch_ref.Experts(3, 32, 18, bias=True).double()
    for name in ("W_gate", "W_up", "W_down"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        other.weight.data = torch.tensor(np.asarray(mine.kernel[...].swapaxes(1, 2)))
        other.bias.data = torch.tensor(np.asarray(mine.bias[...]))
    x = numbers(2, 5, 32)
    routing = router(jnp.asarray(x))
    weights, experts, logits = (torch.tensor(np.asarray(part)) for part in routing)
    of_torch = torch_ref.Routing(weights, experts.long(), logits)
    for name in ("W_gate", "W_up"):
        mine, other = held(weight, block, 3)
        # In floats first, then as they are held.
        getattr(ours, name).kernel.set_value(mine.floats().swapaxes(1, 2))
    floats = np.asarray(ours(jnp.asarray(x), routing))
    for name in ("W_gate", "W_up"):
        setattr(ours, name, quantized_as(getattr(ours, name), mine))
        bias = getattr(theirs, name).bias
        setattr(theirs, name, torch_ref.QuantizedLinear(other, bias))
    scale = np.abs(floats).max()
    found = ours(jnp.asarray(x), routing)
    np.testing.assert_allclose(found, floats, rtol=0, atol=1e-12 * scale)
    expected = theirs(torch.tensor(x), of_torch).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * scale)


def test_the_output_is_as_near_as_rounding_allows():
    matrix, x = numbers(31, 9), numbers(4, 31)
    layer = flax_attn.QuantizedLinear(jnp.asarray(matrix))
    error = np.abs(layer(jnp.asarray(x)) - x @ matrix)
    scale = np.asarray(layer.scale[...])
    bound = np.abs(x).sum(axis=-1, keepdims=True) * scale.T / 2
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
