"""Layouts against the layers they are named after.

Weights are converted both ways; outputs and attention weights are equal.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx, traverse_util

import flax_attn
from flax_attn import convert
from parity_tests.asserts import assert_near

T, S, BATCH, HEADS, D = 5, 7, 3, 4, 8
RANDOM = np.random.default_rng(0)
VISIBLE = RANDOM.random((BATCH, HEADS, T, S)) < 0.7
VISIBLE[..., 0] = True


def ours(d_in, kdim, vdim, bias, seed=0):
    options = {"qkv_bias": bias, "out_bias": bias, "causal": False, "kdim": kdim, "vdim": vdim}
    return flax_attn.MultiHeadAttention(
        d_in, D, None, 0.0, HEADS, **options, param_dtype=jnp.float64, rngs=nnx.Rngs(seed)
    )


def inputs(d_in, kdim, vdim):
    random = np.random.default_rng(1)
    return [
        random.normal(size=(BATCH, length, d)) for length, d in ((T, d_in), (S, kdim), (S, vdim))
    ]


def call_ours(module, arrays, visible=None):
    mask = None if visible is None else jnp.asarray(visible)
    attend = jax.jit(lambda *x: module.attend(*x, mask=mask, return_weights=True))
    found = attend(*map(jnp.asarray, arrays))
    return {"output": np.asarray(found.output), "weights": np.asarray(found.weights)}


def assert_equal(left, right):
    assert_near(left, right)


def assert_same_entries(left, right):
    assert set(left) == set(right)
    assert all((np.asarray(left[name]) == np.asarray(right[name])).all() for name in left)


def torch_layer(kdim, vdim, bias):
    layer = torch.nn.MultiheadAttention(
        D, HEADS, bias=bias, kdim=kdim, vdim=vdim, batch_first=True, dtype=torch.double
    )
    for parameter in layer.parameters():  # its biases start at zero
        parameter.data = torch.from_numpy(RANDOM.normal(size=parameter.shape))
    return layer.eval()


def call_torch(layer, arrays, visible=None):
    hidden = (
        None if visible is None else torch.from_numpy(~visible).flatten(0, 1)
    )  # True = hidden, there
    tensors = [torch.from_numpy(x) for x in arrays]
    output, weights = layer(
        *tensors, attn_mask=hidden, need_weights=True, average_attn_weights=False
    )
    return {"output": output.detach().numpy(), "weights": weights.detach().numpy()}


TORCH = pytest.mark.parametrize(("kdim", "vdim"), [(D, D), (5, 3)], ids=["packed", "kdim"])
BIAS = pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
MASK = pytest.mark.parametrize("visible", [None, VISIBLE], ids=["open", "masked"])


@TORCH
@BIAS
@MASK
def test_torch_multihead_attention_into_ours(kdim, vdim, bias, visible):
    layer, module = torch_layer(kdim, vdim, bias), ours(D, kdim, vdim, bias)
    convert.load_state_dict(module, layer.state_dict(), "torch_mha")
    arrays = inputs(D, kdim, vdim)
    assert_equal(call_ours(module, arrays, visible), call_torch(layer, arrays, visible))


@TORCH
@BIAS
def test_ours_into_torch_multihead_attention(kdim, vdim, bias):
    layer, module = torch_layer(kdim, vdim, bias), ours(D, kdim, vdim, bias)
    weights = convert.state_dict(module, "torch_mha")
    layer.load_state_dict(
        {name: torch.from_numpy(array) for name, array in weights.items()}, strict=True
    )
    assert_same_entries(layer.state_dict(), weights)
    arrays = inputs(D, kdim, vdim)
    assert_equal(call_ours(module, arrays, VISIBLE), call_torch(layer, arrays, VISIBLE))


def nnx_layer(d_in, kdim, bias):
    with jax.numpy_dtype_promotion("standard"):
        return nnx.MultiHeadAttention(
            HEADS,
            d_in,
            qkv_features=D,
            out_features=D,
            in_kv_features=kdim,
            use_bias=bias,
            decode=False,
            dtype=jnp.float64,
            param_dtype=jnp.float64,
            bias_init=nnx.initializers.normal(1.0),
            rngs=nnx.Rngs(2),
        )


def call_nnx(layer, arrays):
    """Return output and weights.

    Unless it is asked for weights, the layer takes the softmax in float32, whatever the dtype.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        capturing = nnx.capture(layer, nnx.Intermediate)
        output, seen = capturing(
            *map(jnp.asarray, arrays), mask=jnp.asarray(VISIBLE), sow_weights=True
        )
    return {"output": np.asarray(output), "weights": np.asarray(*seen["attention_weights"])}


def nnx_weights(layer):
    return {
        ".".join(map(str, p)): np.asarray(v[...])
        for p, v in nnx.to_flat_state(nnx.state(layer, nnx.Param))
    }


@BIAS
def test_flax_nnx_into_ours(bias):
    layer, module = nnx_layer(6, 5, bias), ours(6, 5, 5, bias)
    convert.load_state_dict(module, nnx_weights(layer), "flax")
    arrays = inputs(6, 5, 5)
    assert_equal(call_ours(module, arrays, VISIBLE), call_nnx(layer, arrays))


@BIAS
def test_ours_into_flax_nnx(bias):
    layer, module = nnx_layer(6, 5, bias), ours(6, 5, 5, bias)
    weights = convert.state_dict(module, "flax")
    for path, param in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
        param[...] = jnp.asarray(weights.pop(".".join(path)))
    assert not weights
    assert_same_entries(nnx_weights(layer), convert.state_dict(module, "flax"))
    arrays = inputs(6, 5, 5)
    assert_equal(call_ours(module, arrays, VISIBLE), call_nnx(layer, arrays))


def linen_layer(bias):
    return linen.MultiHeadDotProductAttention(
        num_heads=HEADS,
        qkv_features=D,
        out_features=D,
        use_bias=bias,
        dtype=jnp.float64,
        param_dtype=jnp.float64,
        bias_init=linen.initializers.normal(1.0),
    )


def call_linen(layer, params, arrays):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return {
            "output": np.asarray(
                layer.apply(params, *map(jnp.asarray, arrays), mask=jnp.asarray(VISIBLE))
            )
        }


@BIAS
def test_flax_linen_into_ours_as_a_nested_tree(bias):
    layer, module, arrays = linen_layer(bias), ours(6, 5, 3, bias), inputs(6, 5, 3)
    params = layer.init(jax.random.key(4), *map(jnp.asarray, arrays))
    convert.load_state_dict(module, params["params"], "flax")
    assert_equal(
        {"output": call_ours(module, arrays, VISIBLE)["output"]}, call_linen(layer, params, arrays)
    )
    other = ours(6, 5, 3, bias, seed=9)
    convert.load_state_dict(other, params, "flax", prefix="params.")
    assert_same_entries(convert.state_dict(other), convert.state_dict(module))


@BIAS
def test_ours_into_flax_linen(bias):
    layer, module, arrays = linen_layer(bias), ours(6, 5, 3, bias), inputs(6, 5, 3)
    tree = traverse_util.unflatten_dict(
        convert.state_dict(module, "flax", prefix="params."), sep="."
    )
    shapes = jax.eval_shape(lambda: layer.init(jax.random.key(0), *map(jnp.asarray, arrays)))
    assert jax.tree.map(jnp.shape, tree) == jax.tree.map(jnp.shape, shapes)
    assert_equal(
        {"output": call_ours(module, arrays, VISIBLE)["output"]}, call_linen(layer, tree, arrays)
    )
