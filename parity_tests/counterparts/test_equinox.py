"""The attention of Equinox against torch.nn.MultiheadAttention.

Equinox takes one example, so it is mapped over the batch.
"""

import equinox
import jax
import jax.numpy as jnp
import torch

from flax_attn.parity import assert_parity, compare

B, T, S, D, HEADS, KDIM, VDIM = 3, 5, 7, 8, 2, 6, 4


def attention(bias, **widths):
    biases = {f"use_{name}_bias": bias for name in ("query", "key", "value", "output")}
    return equinox.nn.MultiheadAttention(HEADS, D, **widths, **biases, key=jax.random.key(0))


def torch_attention(bias, **widths):
    return torch.nn.MultiheadAttention(D, HEADS, bias=bias, batch_first=True, **widths).eval()


def output_of_torch(layer, *inputs, lengths=None):
    query, key, value = inputs if len(inputs) > 1 else inputs * 3
    hidden = None if lengths is None else torch.arange(key.shape[1]) >= lengths[:, None]
    return layer(query, key, value, key_padding_mask=hidden, need_weights=False)[0]


def test_cross_attention(checks):
    widths = {"kdim": KDIM, "vdim": VDIM}
    layer = equinox.filter_vmap(attention(True, key_size=KDIM, value_size=VDIM))
    inputs = [(B, T, D), (B, S, KDIM), (B, S, VDIM)]
    options = {"layout": "equinox_mha", "torch_call": output_of_torch}
    report = assert_parity(
        layer, torch_attention(True, **widths), inputs, checks=checks.core, **options
    )
    assert (
        "no effect on the outputs: 8 of 24 elements of in_proj_bias"
        in report.check("gradients").note
    )


def test_padding(checks):
    def call(layer, x, lengths=None):
        if lengths is None:
            return equinox.filter_vmap(layer)(x, x, x)
        seen = jnp.broadcast_to(jnp.arange(T) < lengths[:, None, None], (B, T, T))
        return equinox.filter_vmap(layer)(x, x, x, seen)

    options = {
        "layout": "equinox_mha",
        "flax_call": call,
        "torch_call": output_of_torch,
        "locate": False,
    }
    layers = attention(False), torch_attention(False), [(B, T, D)]
    assert_parity(*layers, checks=checks.core, extras={"lengths": [2, 5, 4]}, **options)
    report = compare(
        *layers, checks=["padded rows"], **options
    )  # it gives the mean of the values there, torch 0
    assert "worst element (0," in report.check("padded rows").explain()
    assert report.check("padded rows").where["torch"] == 0
