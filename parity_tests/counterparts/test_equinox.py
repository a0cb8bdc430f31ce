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
    # Each projection has a flag of its own.
    biases = {f"use_{name}_bias": bias for name in ("query", "key", "value", "output")}
    return equinox.nn.MultiheadAttention(HEADS, D, **widths, **biases, key=jax.random.key(0))


def torch_attention(bias, **widths):
    return torch.nn.MultiheadAttention(D, HEADS, bias=bias, batch_first=True, **widths).eval()


def output_of_torch(layer, *inputs, lengths=None):
    query, key, value = inputs if len(inputs) > 1 else inputs * 3
    hidden = None if lengths is None else torch.arange(key.shape[1]) >= lengths[:, None]
    return layer(query, key, value, key_padding_mask=hidden, need_weights=False)[0]


CROSS = [(B, T, D), (B, S, KDIM), (B, S, VDIM)]


def test_cross_attention(checks):
    ours = equinox.filter_vmap(attention(True, key_size=KDIM, value_size=VDIM))
    theirs = torch_attention(True, kdim=KDIM, vdim=VDIM)
    options = {"layout": "equinox_mha", "torch_call": output_of_torch}
    report = assert_parity(ours, theirs, CROSS, checks=checks.core, **options)
    # A bias of keys moves all scores of a query alike.
    note = "no effect on the outputs: 8 of 24 elements of in_proj_bias"
    assert note in report.check("gradients").note


def masked(layer, x, lengths=None):
    mapped = equinox.filter_vmap(layer)
    if lengths is None:
        return mapped(x, x, x)
    seen = jnp.broadcast_to(jnp.arange(T) < lengths[:, None, None], (B, T, T))
    return mapped(x, x, x, seen)


PADDED = {
    "layout": "equinox_mha",
    "flax_call": masked,
    "torch_call": output_of_torch,
    "locate": False,
}


def test_padding(checks):
    sides = attention(False), torch_attention(False)
    lengths = {"lengths": [2, 5, 4]}
    assert_parity(*sides, [(B, T, D)], checks=checks.core, extras=lengths, **PADDED)


def test_a_row_without_a_key():
    sides = attention(False), torch_attention(False)
    report = compare(*sides, [(B, T, D)], checks=["padded rows"], **PADDED)
    check = report.check("padded rows")
    assert "worst element (0," in check.explain()
    # Equinox gives the mean of the values there.
    assert check.where["torch"] == 0
