"""jax.nn.dot_product_attention beside torch's scaled_dot_product_attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from torch.nn.functional import scaled_dot_product_attention

from field.port import Built, Port

SAME = [(2, 6, 4, 5)] * 3
GROUPED = [(2, 6, 4, 5), (2, 6, 2, 5), (2, 6, 2, 5)]
CROSS = [(2, 3, 4, 5), (2, 6, 4, 5), (2, 6, 4, 5)]


def ports() -> list[Port]:
    """Return the ports of JAX itself."""
    attend, sdpa = jax.nn.dot_product_attention, scaled_dot_product_attention
    causal = {"is_causal": True}
    rows = {
        "plain": ("no mask", SAME, attend, sdpa),
        "causal": ("is_causal", SAME, _with(attend, **causal), _with(sdpa, **causal)),
        "causal-cross": (
            (
                "is_causal, three queries and six keys: the first query sees the first key on both"
                " sides"
            ),
            CROSS,
            _with(attend, **causal),
            _with(sdpa, **causal),
        ),
        "grouped": (
            "two key/value heads for four query heads",
            GROUPED,
            attend,
            _with(sdpa, enable_gqa=True),
        ),
        "bias": ("an additive bias", [*SAME, (2, 4, 6, 6)], attend, sdpa),
        "window": (
            "local_window_size=(2, 1)",
            SAME,
            _with(attend, local_window_size=(2, 1)),
            _windowed,
        ),
        "lengths": ("key_value_seq_lengths, padding", SAME, _lengths, _visible),
        "mask": ("a boolean mask, padding", SAME, _masked, _visible),
    }
    return [_port(name, *row) for name, row in rows.items()]


def _port(name, configuration, inputs, ours, theirs):
    padded = "padding" in configuration
    twin, checks = (
        "torch's scaled_dot_product_attention",
        ("forward", "gradients", *["padded rows"] * padded),
    )
    name = f"jax/nn.dot_product_attention/{name}"
    calls = dict.fromkeys(("flax_call", "torch_call"), _padded if padded else _plain)

    def build(dtype):
        return Built(ours, _heads_first(theirs), inputs, [None], **calls)

    return Port(name, "jax", configuration, build, twin, checks)


def _plain(function, *arrays):
    return function(*arrays)


def _padded(function, query, key, value, mask=None):
    return function(query, key, value, mask)


def _with(function, **options):
    return lambda *arrays: function(*arrays, **options)


def _heads_first(function):
    return lambda q, k, v, *rest: function(
        *(x.transpose(1, 2) for x in (q, k, v)), *rest
    ).transpose(1, 2)


def _windowed(query, key, value):
    distance = torch.arange(key.shape[-2]) - torch.arange(query.shape[-2])[:, None]
    return scaled_dot_product_attention(query, key, value, (distance >= -2) & (distance <= 1))


def _visible(query, key, value, mask):
    return scaled_dot_product_attention(
        query, key, value, None if mask is None else mask[:, None, None]
    )


def _masked(query, key, value, mask):
    mask = None if mask is None else mask[:, None, None]
    return jax.nn.dot_product_attention(query, key, value, mask=mask)


def _lengths(query, key, value, mask):
    lengths = None if mask is None else mask.sum(-1).astype(jnp.int32)
    return jax.nn.dot_product_attention(query, key, value, key_value_seq_lengths=lengths)
