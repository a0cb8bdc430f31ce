"""The attention of Flax and of Equinox into torch.nn.MultiheadAttention, and back."""

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx, traverse_util

from flax_attn import convert

BATCH, T, S, HEADS, D, KV = 2, 5, 7, 4, 12, 6
BIAS = pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
WIDTHS = pytest.mark.parametrize("width", [D, KV], ids=["packed", "kdim"])


def torch_attention(rig, kdim, vdim, bias):
    return rig.theirs(
        torch.nn.MultiheadAttention(D, HEADS, bias=bias, kdim=kdim, vdim=vdim, batch_first=True)
    )


def nnx_attention(width, bias, **options):
    with jax.numpy_dtype_promotion("standard"):
        return nnx.MultiHeadAttention(
            HEADS,
            D,
            in_kv_features=width,
            use_bias=bias,
            decode=False,
            param_dtype=jnp.float64,
            rngs=nnx.Rngs(0),
            **options,
        )


@BIAS
@WIDTHS
def test_nnx(rig, width, bias):
    ours, theirs = nnx_attention(width, bias), torch_attention(rig, width, width, bias)
    rig.load_both_ways(ours, theirs, "nnx_mha")
    query, memory = rig.normal(BATCH, T, D), rig.normal(BATCH, S, width)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        # Not asked for weights, it takes the softmax in float32, whatever the dtype.
        output, _ = nnx.capture(ours, nnx.Intermediate)(
            jnp.asarray(query), jnp.asarray(memory), sow_weights=True
        )
    rig.assert_equal(
        np.asarray(output), theirs(*(torch.from_numpy(x) for x in (query, memory, memory)))[0]
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_kv_heads": 2}, r"no grouped queries; got num_heads=4, num_kv_heads=2"),
        ({"qkv_features": 8}, r"equally wide; got in_features=12, qkv_features=8, out_features=12"),
        ({"out_features": 5}, r"equally wide; got in_features=12, qkv_features=12, out_features=5"),
        ({"normalize_qk": True}, r"no place for key_ln.scale \(3,\), query_ln.scale \(3,\)"),
    ],
)
def test_nnx_that_torch_does_not_have_is_refused(options, match):
    with pytest.raises(convert.ConversionError, match=match):
        convert.state_dict(nnx_attention(D, True, **options), "nnx_mha")


@BIAS
def test_linen_as_a_nested_tree(rig, bias):
    theirs = torch_attention(rig, D, D, bias)
    published = theirs.state_dict()
    layer = linen.MultiHeadDotProductAttention(
        num_heads=HEADS, use_bias=bias, param_dtype=jnp.float64
    )
    query, memory = rig.normal(BATCH, T, D), rig.normal(BATCH, S, D)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        shapes = jax.eval_shape(layer.init, jax.random.key(0), query, memory)["params"]
        ours = convert.from_layout(published, "nnx_mha", like=shapes)
        params = {"params": traverse_util.unflatten_dict(ours, sep=".")}
        output = jax.jit(layer.apply)(params, query, memory)
    rig.assert_equal(
        np.asarray(output), theirs(*(torch.from_numpy(x) for x in (query, memory, memory)))[0]
    )
    again = convert.to_layout(params["params"], "nnx_mha")
    assert again.keys() == published.keys()
    assert all(
        array.tobytes() == published[name].numpy().tobytes() for name, array in again.items()
    )


def equinox_attention(rig, kdim, vdim, bias):
    names = ("query", "key", "value", "output")
    layer = equinox.nn.MultiheadAttention(
        HEADS,
        D,
        kdim,
        vdim,
        **{f"use_{name}_bias": bias for name in names},
        dtype=jnp.float64,
        key=jax.random.key(0),
    )
    return jax.tree.map(
        lambda x: jnp.asarray(rig.normal(*x.shape)) if equinox.is_array(x) else x, layer
    )


def equinox_weights(layer):
    leaves = jax.tree_util.tree_leaves_with_path(equinox.filter(layer, equinox.is_array))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def equinox_from(layer, weights):
    def replace(path, leaf):
        return jnp.asarray(weights[jax.tree_util.keystr(path, simple=True, separator=".")])

    arrays, rest = equinox.partition(layer, equinox.is_array)
    return equinox.combine(jax.tree_util.tree_map_with_path(replace, arrays), rest)


@BIAS
@pytest.mark.parametrize(("kdim", "vdim"), [(D, D), (KV, 3)], ids=["packed", "kdim"])
def test_equinox(rig, kdim, vdim, bias):
    ours, theirs = equinox_attention(rig, kdim, vdim, bias), torch_attention(rig, kdim, vdim, bias)
    query, key, value = rig.normal(T, D), rig.normal(S, kdim), rig.normal(S, vdim)

    def assert_equal(ours):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            output = np.asarray(ours(*map(jnp.asarray, (query, key, value))))
        rig.assert_equal(
            np.asarray(output), theirs(*(torch.from_numpy(x) for x in (query, key, value)))[0]
        )

    published, shapes = theirs.state_dict(), equinox_weights(ours)
    loaded = convert.from_layout(published, "equinox_mha", like=shapes)
    again = convert.to_layout(loaded, "equinox_mha")
    assert again.keys() == published.keys()
    assert all(
        array.tobytes() == published[name].numpy().tobytes() for name, array in again.items()
    )
    assert_equal(equinox_from(ours, loaded))

    exported = convert.to_layout(shapes, "equinox_mha")
    theirs.load_state_dict(
        {name: torch.from_numpy(array) for name, array in exported.items()}, strict=True
    )
    assert_equal(ours)
